"""Schedulers for SLOs: deadlines decide who is prefilled next, and the pace of decodes how much."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Order, Rules
from optsched.policies.unified import DECODE_FIRST

TOKENS = 512
"""Max tokens of a batch, which bounds how long a prefill delays the decodes beside it."""

CHUNKS = Rules(groups=DECODE_FIRST, chunked=True)


def _rules(order: Order, late_last: bool, tokens: int, max_running: int | None) -> Rules:
    made = replace(CHUNKS, order=order, late_last=late_last)
    return replace(made, max_batch_tokens=tokens, max_running=max_running)


@policy("edf", "earliest deadline of the first token first, decodes first, chunked prefill")
def edf(
    *, late_last: bool = False, max_batch_tokens: int = TOKENS, max_running: int | None = None
) -> Rules:
    """Return rules that admit the request whose first token is due first."""
    return _rules("deadline", late_last, max_batch_tokens, max_running)


@policy("least-slack", "least time to spare before the prefill must start first")
def least_slack(
    *, late_last: bool = False, max_batch_tokens: int = TOKENS, max_running: int | None = None
) -> Rules:
    """Return rules that admit the request whose prefill must start first to be in time."""
    return _rules("slack", late_last, max_batch_tokens, max_running)


@policy("late-last", "first come first served, but who can no longer be in time waits behind all")
def late_last(*, max_batch_tokens: int = TOKENS, max_running: int | None = None) -> Rules:
    """Return rules that give up requests whose first token will be late, and serve them last.

    A schedule serves every request. For attainment, to serve one last is to drop it early.
    """
    return _rules("arrival", True, max_batch_tokens, max_running)


@policy("paced", "chunks as large as the TPOT limits of running requests allow, late ones last")
def paced(
    *,
    hold: float = 2.0,
    catch_up: float = 1.0,
    lump: float = 0.5,
    late_last: bool = True,
    by_slack: bool = False,
    eviction_free: bool = False,
    max_running: int | None = None,
) -> Rules:
    """Return rules that prefill as much in a batch as keeps the pace of those that decode.

    docs/policies/deadlines.md and `Rules` describe the parameters. With `by_slack` the request is
    admitted whose prefill must start first to be in time, else as they arrive; if `eviction_free`,
    only where the predicted peaks of all fit together.
    """
    made = replace(CHUNKS, order="slack" if by_slack else "arrival", late_last=late_last)
    if eviction_free:
        made = replace(made, admission="reserve")

    made = replace(made, paced=True, hold=hold, catch_up=catch_up, lump=lump)
    return replace(made, max_running=max_running)
