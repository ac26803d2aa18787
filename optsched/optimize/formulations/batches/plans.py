"""Plans, which are lists of batches: their requests' states, exact times, schedules, answers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations.base import Answer
from optsched.optimize.formulations.batches.batch_count import least_makespan
from optsched.optimize.formulations.batches.problem import (
    COUNTED,
    ENDS,
    Batch,
    BatchProblem,
    Costs,
    Times,
)
from optsched.optimize.solvers.base import BOUND_TOLERANCE, SolveOptions, Status
from optsched.problem.errors import OutOfTimeError, SolverError
from optsched.problem.notes import warn
from optsched.problem.schedule import Schedule, check_columns, from_batches
from optsched.problem.service import SLOS
from optsched.workloads.problem import Problem

Plan = list[Batch]


class Requests:
    """The state of every request between two batches.

    `cached` is 0 once it has finished. `ready`: the next step decodes, since all input is cached.
    """

    def __init__(self, prob: BatchProblem) -> None:
        self._prob = prob
        self.cached = [0] * prob.n
        self.produced = [0] * prob.n
        self.ready = [False] * prob.n

    def rest(self, i: int) -> int:
        """Return how many tokens a request must process until the next one is produced."""
        return self._prob.prompt[i] + self.produced[i] - self.cached[i]

    def done(self, i: int) -> bool:
        """Whether a request has finished."""
        return self.produced[i] == self._prob.output[i]

    def evict(self, requests: Iterable[int]) -> None:
        """Free the KV of requests."""
        for i in requests:
            self.cached[i], self.ready[i] = 0, False

    def length(self, entries: Sequence[tuple[int, int]], costs: Costs) -> int:
        """Return the time of a batch of (request, tokens), in the unit of the costs."""
        decodes = [self.ready[i] for i, _ in entries]
        total = costs.fixed(any(decodes), not all(decodes))
        for i, tokens in entries:
            kv = self.cached[i]
            total += costs.decode(kv) if self.ready[i] else costs.prefill(tokens, kv)

        return total

    def process(self, entries: Iterable[tuple[int, int]]) -> list[int]:
        """Process a batch. Return who produced a token. Finished requests free their KV.

        A prefill in chunks produces its token with its last chunk.
        """
        producers = []
        for i, tokens in entries:
            complete = tokens == self.rest(i)
            self.cached[i] += tokens
            if complete:
                self.ready[i] = True
                self.produced[i] += 1
                producers.append(i)
                if self.done(i):
                    self.evict([i])

        return producers


def token_ends(
    prob: BatchProblem,
    plan: Plan,
    costs: Costs,
    arrival: Sequence[Any],
    start: Sequence[Any] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield each token's request and its end, in order, in the unit of the costs and arrivals.

    ``start`` has the batches' starts; None: each as early as may be.
    """
    requests, clock = Requests(prob), 0
    for j, batch in enumerate(plan):
        requests.evict(batch.evicted)
        # It waits for all that it processes, and then for the machine.
        begin = max(arrival[i] for i, _ in batch.entries) if start is None else start[j]
        clock = max(clock, begin) + requests.length(batch.entries, costs)
        yield from ((i, clock) for i in requests.process(batch.entries))


def exact_times(prob: BatchProblem, plan: Plan, start: Sequence[float] | None = None) -> Times:
    """Return the exact times of decisions that the judge accepts.

    They are in the unit of `BatchProblem.exact`, since the first arrival. `start` has starts in
    seconds since then; None: each batch as early as may be.
    """
    first, last = dict[int, Fraction](), dict[int, Fraction]()
    gap, missing = [Fraction(0)] * prob.n, list(prob.output)
    starts = None
    if start is not None:
        starts = [Fraction(float(t)) / prob.exact.unit_s for t in start]

    for i, time in token_ends(prob, plan, prob.exact, prob.exact_arrival, starts):
        # Costs and arrivals may be integers, of which quotients would be floats.
        end = Fraction(time)
        first.setdefault(i, end)
        # Before the first token there is no gap.
        gap[i] = max(gap[i], end - last.get(i, end))
        last[i] = end
        missing[i] -= 1

    for i in range(prob.n):
        if missing[i]:
            raise SolverError(
                f"infermax: found no finish of request {i} in a plan; expected all its tokens"
            )

    return Times([first[i] for i in range(prob.n)], [last[i] for i in range(prob.n)], gap)


def plan_of(schedule: Schedule) -> Plan:
    """Return a schedule's decisions as a list of batches. Their starts are left out.

    Batch j of the schedule has the entries from ``offsets[j]`` to ``offsets[j + 1]``, and likewise
    those evicted.
    """
    offsets, request, tokens, evicted_offsets, evicted = (
        column.tolist() for column in check_columns(schedule)
    )
    entries = list(zip(request, tokens, strict=True))
    return [
        Batch(
            tuple(entries[offsets[j] : offsets[j + 1]]),
            tuple(evicted[evicted_offsets[j] : evicted_offsets[j + 1]]),
        )
        for j in range(len(offsets) - 1)
    ]


def to_schedule(prob: BatchProblem, plan: Plan, start: Sequence[float] | None = None) -> Schedule:
    """Return the schedule of batches, for the judge. `start` is as of `exact_times`."""
    entries = [entry for batch in plan for entry in batch.entries]
    return from_batches(
        np.cumsum([0] + [len(batch.entries) for batch in plan]),
        [i for i, _ in entries],
        [tokens for _, tokens in entries],
        instance=prob.instance,
        evicted_offsets=np.cumsum([0] + [len(batch.evicted) for batch in plan]),
        evicted=[i for batch in plan for i in batch.evicted],
        start=None if start is None else prob.instance.at(start),
        cost_model_sha256=prob.model.sha256,
    )


class Scale(NamedTuple):
    """The scale of a solver's numbers: level = number / unit.

    ``whole``: the numbers are whole levels (`UNITS`), and not milliseconds in floats.
    """

    unit: Fraction
    whole: bool

    def level(self, number: float | None) -> Fraction | None:
        """Return the level that a solver's bound proves, with its tolerance taken off."""
        if number is None or not math.isfinite(number):
            return None
        # A float may stand a little above the whole bound, which is rounded up to the next level:
        # 1e-3, or as much as floats of this size are coarse.
        if self.whole:
            exact = isinstance(number, int)
            return Fraction(number if exact else math.ceil(number - max(1e-3, 1e-15 * number)))

        return Fraction(number - BOUND_TOLERANCE * max(1.0, abs(number))) / self.unit

    def in_values(self, options: SolveOptions, prob: BatchProblem) -> SolveOptions:
        """Return options that report progress in the instance's unit."""

        def value(number: float) -> float | None:
            # 0 and infinity say that nothing is known yet.
            if not 0 < number < math.inf:
                return None

            return prob.value(prob.objectives[0], Fraction(number) / self.unit)

        return options.reporting(value)


UNITS = Scale(Fraction(1), True)
"""The scale of the models' exact integers."""


class Claim(NamedTuple):
    """What a method claims to have found, in the models' unit.

    `status` is what it proved in integers; with ``OPTIMAL`` the bound is the objective. `level` is
    that of the incumbent `plan`, which `answer` checks, and `start` its starts if not the earliest
    ones.
    """

    status: Status
    plan: Plan | None
    bound: Fraction | int | None
    start: list[float] | None = None
    level: int | None = None


def answer(
    prob: BatchProblem,
    claim: Claim,
    native_status: str,
    solve_s: float = 0.0,
    *,
    fallback: Plan | None = None,
    room: int | None = None,
) -> Answer:
    """Return a method's answer, whose objective is recomputed exactly from the decisions.

    If nothing was proved, the bound from own work and the batches needed counts, too. `fallback` is
    the incumbent if the method was stopped before it found one. `room` is how many batches its
    model has, for an error. Levels are in exact units, bounds in the models' unit, which is
    `BatchProblem.shrink` times as large.
    """
    name = prob.objectives[0]
    status, plan, bound, start, claimed = claim
    objective = schedule = claim_value = None

    # Nothing below the cutoff: that is a bound. Levels are whole, so it is rounded up.
    if status is Status.INFEASIBLE:
        if prob.cutoff is None:
            raise SolverError(
                f"infermax: found no schedule of {room} batches; expected one, as every request "
                "can be served alone; the model or the solver is wrong"
            )

        bound = math.ceil(prob.cutoff)

    if status in (Status.FEASIBLE, Status.NO_INCUMBENT):
        smallest = _least_level(prob)
        bound = smallest if bound is None else max(smallest, bound)

    if plan is None and status is Status.NO_INCUMBENT and fallback is not None:
        plan, status = fallback, Status.FEASIBLE

    level = None if plan is None else prob.level(name, exact_times(prob, plan, start))
    if prob.cutoff is not None and level is not None and level / prob.shrink >= prob.cutoff:
        # In rounded costs the schedule may be below the value asked for. In exact ones it is not,
        # and so it is no answer. The proof counts only if it reaches that value.
        none_below = status is Status.OPTIMAL and bound is not None and bound >= prob.cutoff
        status = Status.INFEASIBLE if none_below else Status.NO_INCUMBENT
        bound = prob.cutoff if none_below else bound
        level = None

    if plan is not None and level is not None:
        objective = claim_value = prob.value(name, level, exact=True)
        schedule = to_schedule(prob, plan, start)
        # The models count with a little to spare (`BatchProblem.within`), the judge does not.
        if name == COUNTED:
            objective = _judged_share(prob, schedule)

        proved = bound if status is Status.OPTIMAL else None
        _check_levels(prob, level / prob.shrink, claimed, proved)

    # A proved value in exact costs is its own bound, and rounded arrivals take nothing off it. Else
    # these may have lengthened latencies. Limits were given a unit more instead (`labels._due`).
    if status is Status.OPTIMAL and len(prob.objectives) == 1 and prob.shrink == 1:
        value = None if objective is None else claim_value
    else:
        spare = 0 if name == COUNTED else prob.floored
        value = None if bound is None else prob.value(name, max(Fraction(0), bound - spare))

    if status is Status.OPTIMAL and prob.shrink > 1:
        status = Status.FEASIBLE  # optimal for rounded costs

    return Answer(status, schedule, objective, value, native_status, solve_s)


def unbuilt(prob: BatchProblem, start: Plan | None, why: OutOfTimeError) -> Answer:
    """Return the answer, with a warning, of a method whose model was not built in time."""
    warn(f"infermax: no model was solved: {why}", stacklevel=2)
    return answer(prob, Claim(Status.NO_INCUMBENT, None, None), str(why), fallback=start)


def _judged_share(prob: BatchProblem, schedule: Schedule) -> float:
    """Return the share of requests within their SLOs as the judge has it, with nothing to spare."""
    judged = evaluate(Problem(prob.instance, prob.model), schedule)
    good = np.ones(prob.n, dtype=bool)
    for slo, limit in prob.slos.items():
        good &= ~(getattr(judged, SLOS[slo]) > limit)

    return float(good.mean())


def _check_levels(
    prob: BatchProblem, level: Fraction, claimed: int | None, proved: Fraction | int | None
) -> None:
    """Check the levels that a method claims and proves against the schedule's own level.

    All are in the models' unit, and None is nothing to check. A level that differs by more than
    rounding explains says that a model or a solver is wrong.
    """
    name = prob.objectives[0]
    # Integers may be off by `rounded` units, and beyond 1e9 by as much more as floats are coarser.
    rounding = prob.rounded * max(Fraction(1), level / 10**9)
    for words, other_level in (("claimed to have", claimed), ("called optimal at", proved)):
        # Costs that are rounded down make the level smaller, and never larger.
        low = 0 if prob.shrink > 1 else level - rounding
        if other_level is not None and not low <= other_level <= level + rounding:
            raise SolverError(
                f"infermax: found a schedule of {name} {prob.value(name, level):.12g} s that is "
                f"{words} {prob.value(name, other_level):.12g}; expected the same value; "
                "the model or the solver is wrong"
            )


def _least_level(prob: BatchProblem) -> int:
    """Return the bound on the first objective's level that needs no search; 0 if none is known."""
    name = prob.objectives[0]
    if name in ENDS:
        ends = [a + t for a, t in zip(prob.arrival, prob.least_latency, strict=True)]
        return max(least_makespan(prob), *ends)

    return sum(prob.least_latency) if name == "tel" else 0


def known_level(prob: BatchProblem, times: Times | None) -> int | None:
    """Return a level that the models' integers reach, from a known schedule, without ``below``."""
    if times is None or prob.cutoff is not None:
        return None

    return math.ceil(prob.level(prob.objectives[0], times) / prob.shrink) + prob.rounded


def max_batches(prob: BatchProblem, best: Times | None) -> int:
    """Return a number of batches J that some optimal schedule does not exceed.

    docs/formulations.md, "The CSP", proves the three numbers of which the least counts: sum o
    without chunks, sum_i sum_{k < o_i} (s_i + k) with them, and what fits before the last
    completion F of a schedule that is better than a known one. For TEL, F <= U minus the min
    latencies of all requests but the last to finish. It is never below the longest output, whose
    tokens are in batches of their own.
    """
    largest = sum(prob.output)
    if prob.chunked:
        largest = sum(s + k for s, o in prob.sizes for k in range(o))

    last = _latest_finish(prob, best)
    # The fixed costs of a batch that only decodes, and of one that only prefills.
    decode_batch, prefill_batch = prob.costs.fixed(True, False), prob.costs.fixed(False, True)
    smallest = min(decode_batch, prefill_batch)

    if last is not None and smallest > 0:
        prefills = -(-sum(prob.prompt) // min(prob.prefill_tokens, prob.capacity))
        # What is left of the time after own work pays for batches, of which some must prefill.
        spare = last - prob.total_work
        spare -= prefills * max(0, prefill_batch - decode_batch)
        largest = min(largest, max(0, math.floor(spare / smallest)))

    return max(largest, max(prob.output))


def _latest_finish(prob: BatchProblem, best: Times | None) -> Fraction | int | None:
    """Return a bound on the last completion of every schedule that is not worse, if there is one.

    ``best`` has the times of the known schedule, and the cutoff counts, too. For the makespan and
    ``tps`` the level is the last completion. Of ``tel`` it is what the min latencies of the others
    leave for the last to finish. Other objectives do not bound it.
    """
    name, limit = prob.objectives[0], prob.cutoff
    if best is not None:
        # Where costs or arrivals are rounded, the level in the models' integers may be larger than
        # the exact one by `rounded`, and by 1 for rounding this up.
        value = prob.level(name, best) / prob.shrink + (prob.rounded + 1 if prob.rounded else 0)
        limit = value if limit is None else min(limit, value)

    if limit is None or name in ENDS:
        return limit
    if name != "tel":
        return None

    # All but the last to finish have their min latencies at least. Who is last is not known, so the
    # largest of these is not taken off, and it arrives by the last arrival. Arrivals are rounded
    # down by less than a unit: hence 1 more.
    smallest = prob.least_latency
    return limit - sum(smallest) + max(smallest) + max(prob.arrival) + 1
