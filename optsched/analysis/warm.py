"""Compile what commands use: every job once on tiny instances, so that later ones wait for none."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from optsched.analysis.capacity import capacity
from optsched.analysis.compare import compare
from optsched.bounds import list_bounds
from optsched.bounds.certificate import verify_certificate
from optsched.costs.cost import shipped_models
from optsched.files.read_write import read_instance
from optsched.optimize.bound import bound
from optsched.optimize.solve import solve
from optsched.problem.budget import work_time
from optsched.problem.errors import OptschedError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY
from optsched.workloads.generate import generate
from optsched.workloads.problem import Problem

# The time limit of a job. Compiling does not count in it.
_JOB_S = 1.0
# Enough requests for the searches that small instances do not need.
_MANY = 60


def warm_up(progress: Callable[[str], None] | None = None) -> float:
    """Compile the loops of all commands, as far as this installation has not kept them.

    What there is to compile is in no list: policies, bounds and their objectives come from their
    registries, and run on tiny instances as they would on others.

    Parameters
    ----------
    progress : callable, optional
        Called with a line of text before each job.

    Returns
    -------
    float
        Seconds in which loops were compiled; 0 if all were kept from before.
    """
    before = work_time.stood_s
    for words, job in _jobs():
        if progress is not None:
            progress(words)

        with warnings.catch_warnings(), suppress(OptschedError):
            warnings.simplefilter("ignore")  # the time limits are short on purpose
            job()

    return work_time.stood_s - before


def _jobs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every job with its words."""
    whole = replace(read_instance("tiny-seconds"), chunked_prefill=False)
    problem = Problem(whole, shipped_models()[0])
    exact = partial(solve, problem, method="labels", time_limit_s=_JOB_S, certify=True)
    yield "solve in seconds, certified", exact
    for words, instance in _instances():
        cost = None if instance.in_rounds else shipped_models()[0]
        problem = Problem(instance, cost)
        limit = dict[str, Any](time_limit_s=_JOB_S)
        yield f"compare {words}", partial(compare, problem, **limit)
        yield f"solve {words}", partial(solve, problem, **limit)

        goals = [TOTAL_LATENCY.name]
        for info in list_bounds().values():
            goals += info.objectives if info.time_unit == instance.time_unit else ()
        for goal in dict.fromkeys(goals):
            yield f"bound {goal} {words}", partial(_bound, problem, goal)

        if not instance.in_rounds:
            limited = replace(problem, slo_ttft=1.0, slo_tpot=1.0)
            yield f"capacity {words}", partial(capacity, limited, search_s=_JOB_S, **limit)


def _instances() -> Iterator[tuple[str, Instance]]:
    """Yield instances with words: small ones, with features that have loops, and more requests."""
    for name in ("tiny", "tiny-seconds"):
        plain = read_instance(name)
        unit = f"in {plain.time_unit}s"
        yield unit, plain
        # Lengths in the order of other requests, so that predictions are wrong.
        yield (
            f"{unit}, predicted",
            replace(plain, predicted=plain.output_tokens[::-1].astype(float)),
        )

    yield "in rounds, many requests", generate("jaillet-model-1", n=_MANY)
    yield "in rounds, over time", generate("jaillet-model-2", n=_MANY // 4)
    yield "in seconds, shared prefixes", generate("prefix-trees", n=_MANY)
    yield "in seconds, drafts", replace(read_instance("tiny-seconds"), num_speculative_tokens=1)


def _bound(problem: Problem, goal: str) -> None:
    """Compute a bound, and verify its certificate if it has one."""
    result = bound(problem.about(goal), time_limit_s=_JOB_S)
    if result.certificate is not None:
        verify_certificate(problem.instance, result.certificate, problem.cost_model)
