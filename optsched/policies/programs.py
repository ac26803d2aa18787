"""Policies that look at whole programs: sessions of calls, such as those of an agent."""

from dataclasses import replace
from typing import Any

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.memory_constrained import CAREFUL
from optsched.policies.runner import Order

BATCH = Rules(groups=("running", "waiting"), chunked=True, max_batch_tokens=2048)
"""Running requests first, and prefills in chunks, as in the engines that these papers build on."""


def in_chunks(
    order: Order, max_running: int | None, max_batch_tokens: int, **fields: float
) -> Rules:
    """Return rules that admit in an order, with prefills in chunks; in rounds they look ahead."""
    own: dict[str, Any] = {"order": order, "max_running": max_running, **fields}
    in_rounds = replace(CAREFUL, **own)
    return replace(BATCH, max_batch_tokens=max_batch_tokens, in_rounds=in_rounds, **own)


@policy("program-fcfs", "calls of the program that arrived first, in chunks beside decodes")
def program_fcfs(*, max_running: int | None = None, max_batch_tokens: int = 2048) -> Rules:
    """Return rules that take waiting calls by the arrival of their session."""
    return in_chunks("session", max_running, max_batch_tokens)


@policy(
    "program-las",
    "calls of the program that has been served least, in chunks beside decodes",
    paper="Luo et al. 2025",
)
def program_las(*, max_running: int | None = None, max_batch_tokens: int = 2048) -> Rules:
    """Return rules that take waiting calls by the service of their program so far.

    The service is the work of the program's calls that have ended when a call is released, as in
    the paper's PLAS. The paper also lets running calls sink in a queue of several levels; here they
    run on.
    """
    return in_chunks("attained", max_running, max_batch_tokens)


@policy(
    "program-hrrn",
    "calls of the program with the largest ratio of response to service, in chunks beside decodes",
    paper="Ni et al. 2025",
)
def program_hrrn(*, max_running: int | None = None, max_batch_tokens: int = 2048) -> Rules:
    """Return rules that sort the queue before every batch by the response ratios of programs.

    That of a call is the time that its program's calls have taken and waited so far, over the work
    of those that have ended and its own prefill. The paper's classes and forecasts are left out.
    """
    return in_chunks("response", max_running, max_batch_tokens)
