"""Compile what commands use on small instances: all of it, or what a command will need later."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from optsched.analysis.capacity import capacity
from optsched.analysis.compare import compare
from optsched.bounds import list_bounds, lower_bound
from optsched.bounds.certificate import verify_certificate
from optsched.files.read_write import read_instance
from optsched.optimize.bound import bound
from optsched.optimize.search.rule_search import Best, RuleSearch
from optsched.optimize.solve import solve
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget, work_time
from optsched.problem.errors import OptschedError
from optsched.problem.instance import Instance
from optsched.problem.kernel import UNKEPT
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.schedule import Schedule, from_batches
from optsched.workloads.generate import generate
from optsched.workloads.problem import Problem

# A linear cost model, as exact methods ask for, and a table, for which bounds have more.
_LINEAR, _TABLE = "llama2-7b-a100-infermax", "llama-3.1-8b-h100-torch"
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


def compile_later(job: str, objective: str) -> None:
    """Compile what a job of `optsched.cli.beside` needs, for an objective where it names none.

    In a process whose code cannot be kept a further job would be for nobody.
    """
    if UNKEPT:
        return

    what, _, more = job.partition(" ")
    if what == "labels":
        few = Problem("tiny-seconds", _LINEAR, objective, slo_ttft=1.0)
        start, certify = _one_by_one(few.instance), more == "certified"
        solve(few, method="labels", warm_start=start, certify=certify, time_limit_s=_JOB_S)
        return

    instance = generate("lognormal", n=_MANY)
    problem = Problem(instance, _LINEAR, more or objective, slo_ttft=1.0, slo_tpot=0.05)
    if what == "bound":
        lower_bound(problem, time_limit_s=_JOB_S)
    elif what == "search":
        best = Best(problem, None, Budget(_JOB_S))
        best.offer(_one_by_one(instance), "known")
        RuleSearch(best, 0).run(best.budget)
    else:
        simulate(problem, what)


def _one_by_one(instance: Instance) -> Schedule:
    """Return the schedule that serves one request after another, which no policy has to find."""
    output = instance.output_tokens
    request = np.repeat(np.arange(instance.n), output)
    tokens = np.ones(len(request), dtype=np.int64)
    tokens[np.cumsum(output) - output] = instance.prompt_tokens
    return from_batches(np.arange(len(request) + 1), request, tokens, instance=instance)


def _jobs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every job with its words."""
    whole = Problem(replace(read_instance("tiny-seconds"), chunked_prefill=False), _LINEAR)
    limit = dict[str, Any](time_limit_s=_JOB_S)
    exact = partial(solve, whole, method="labels", certify=True, **limit)
    yield "solve in seconds, certified", exact
    for words, problem in _problems():
        unit = problem.instance.time_unit
        yield f"compare {words}", partial(compare, problem, **limit)
        yield f"solve {words}", partial(solve, problem, **limit)

        goals = [TOTAL_LATENCY.name]
        for info in list_bounds().values():
            goals += info.objectives if info.time_unit == unit else ()
        for goal in dict.fromkeys(goals):
            yield f"bound {goal} {words}", partial(_bound, problem, goal)

        if unit == "second":
            limited = replace(problem, slo_ttft=1.0, slo_tpot=1.0)
            yield f"capacity {words}", partial(capacity, limited, search_s=_JOB_S, **limit)


def _problems() -> Iterator[tuple[str, Problem]]:
    """Yield problems with words: small ones, with features that have loops, and more requests."""
    for unit, model in (("rounds", None), ("seconds", _LINEAR), ("seconds, by a table", _TABLE)):
        plain = read_instance("tiny" if model is None else "tiny-seconds")
        yield f"in {unit}", Problem(plain, model)
        # Lengths in the order of other requests, so that predictions are wrong.
        swapped = replace(plain, predicted=plain.output_tokens[::-1].astype(float))
        yield f"in {unit}, predicted", Problem(swapped, model)

    yield "in rounds, many requests", Problem(generate("jaillet-model-1", n=_MANY))
    yield "in rounds, over time", Problem(generate("jaillet-model-2", n=_MANY // 4))
    yield "in seconds, shared prefixes", Problem(generate("prefix-trees", n=_MANY), _LINEAR)
    drafting = replace(read_instance("tiny-seconds"), num_speculative_tokens=1)
    yield "in seconds, drafts", Problem(drafting, _LINEAR)


def _bound(problem: Problem, goal: str) -> None:
    """Compute a bound, and verify its certificate if it has one."""
    result = bound(problem.about(goal), time_limit_s=_JOB_S)
    if result.certificate is not None:
        verify_certificate(problem.instance, result.certificate, problem.cost_model)
