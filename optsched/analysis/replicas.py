"""Replica-hours over a day: the fewest that any schedule needs within SLOs, and threshold scaling.

*What is paid.* Time is cut into cells. In cell c there are N(c) equal machines, a whole number, and
they are paid for the whole cell. A machine that was not there in the cell before serves only after
its start-up time, which is at most a cell; those of the first cell are there at once.

*Lower bound.* Let request i be served within its SLOs, with work w_i and its last token by d_i
(`optsched.bounds.service`). Its batches lie in [a_i, d_i], and a batch of length T has own work and
shares of fixed costs of at most T in all. Cut each batch at the ends of cells, and its work in the
proportions of its time. Then the work in a cell is at most the time that machines serve there, so

    minimize   sum of cell * N(c)
    subject to sum over c of y(i, c) >= w_i x_i,  y(i, c) = 0 in cells that [a_i, d_i] misses,
               sum over i of y(i, c) <= cell * N(c) - startup * max(0, N(c) - N(c - 1)),
               sum of x_i >= the requests that must be within their SLOs,  0 <= x_i <= 1

is at most what any schedule pays, whoever decides and whatever he knows. Requests whose windows
meet the same cells are one class; in it they are sorted by work and put into lots, each of which
counts with the smallest work in it, so that the program stays small and the value a bound. What
has no deadline may be served after the last cell, in machine time that is paid as it is used.
HiGHS solves the program; the value is its dual bound, rounded up to whole cells where it may be.

*Threshold scaling.* One machine is there at the beginning. At the end of each cell there will be
as many as it takes for `threshold` unfinished requests each, and at least one. A request goes to
the machine that serves and has the fewest unfinished. A machine that is given up takes no more and
is paid until its last request has ended, in whole cells. So what it pays is paid for some N(c).
"""

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.batch import unavoidable_work
from optsched.bounds.checker.prefixes import charges_of
from optsched.bounds.service import CLOCK, MARGIN, longest_later, most_within
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.policies import make_policy, runner_of
from optsched.policies.routers import begin_on
from optsched.policies.workers import Job, hand_out
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, UsageError
from optsched.problem.limits import all_limits
from optsched.problem.metrics import served_well
from optsched.workloads.predict import predict
from optsched.workloads.problem import Problem

Floats = NDArray[np.float64]
MAX_CELLS, MAX_REPLICAS = 1000, 256
# Lots of a class, and seconds for the program.
_LOTS, _SOLVE_S = 16, 30.0
# The thresholds that are tried, from the laziest on.
_THRESHOLDS = tuple(2**k for k in range(9, -1, -1))


@dataclass(frozen=True)
class Replicas:
    """Replica-seconds of a policy under threshold scaling, and those that any schedule needs.

    `bound`: no schedule with the attainment pays less. `value`: what the policy pays with the
    largest ``threshold`` (unfinished requests for each machine) that has the attainment, None if
    none has. `replicas`: its machines in each cell.
    """

    policy: str
    cell_s: float
    startup_s: float
    bound: float
    value: float | None = None
    threshold: int | None = None
    attainment: float | None = None
    replicas: tuple[int, ...] = ()


def replica_hours(
    problem: Problem,
    cell_s: float,
    *,
    startup_s: float = 0.0,
    policy: str = "vllm-v1",
    attainment: float = 0.99,
    seed: int = 0,
) -> Replicas:
    """Return the machine time of threshold scaling, and the least that any schedule needs.

    Parameters
    ----------
    problem : Problem
        An instance in seconds with SLOs, and one machine, of which there are as many as needed.
    cell_s : float
        Seconds for which the number of machines stays as it is.
    startup_s : float
        Seconds until a new machine serves, at most a cell.
    policy : str
        The scheduler of each machine.
    attainment : float
        Share of the requests that must be within all their SLOs.
    seed : int
        Seed of policies that draw at random.

    Raises
    ------
    InputError, UsageError
        A value is out of its range, the problem is none in seconds on one machine, or so many
        requests cannot be within their SLOs even alone.
    """
    last = float(problem.instance.release.max()) if problem.instance.n else 0.0
    if not last / MAX_CELLS < cell_s < math.inf:
        raise InputError(
            f"replicas_over_time: found {cell_s!r}; expected seconds of a cell, more than "
            f"{last / MAX_CELLS:g} ({MAX_CELLS} cells at most)"
        )
    if not 0 <= startup_s <= cell_s:
        raise InputError(f"startup: found {startup_s!r}; expected 0 to {cell_s:g} s, a cell")
    if not 0 < attainment <= 1:
        raise InputError(f"attainment: found {attainment!r}; expected a share > 0 and <= 1")
    if not isinstance(problem.cost_model, BatchCost) or problem.workers > 1:
        raise UsageError("replicas_over_time: expected an instance in seconds, and one machine")

    need = math.ceil(attainment * problem.instance.n - 1e-9)
    bound = fewest(problem, cell_s, startup_s, need)
    for threshold in _THRESHOLDS:
        paid, good = scaled_by_threshold(problem, cell_s, startup_s, policy, threshold, seed)
        if good >= need:
            seconds, share = cell_s * float(paid.sum()), good / problem.instance.n
            counts = tuple(paid.tolist())
            return Replicas(policy, cell_s, startup_s, bound, seconds, threshold, share, counts)

    return Replicas(policy, cell_s, startup_s, bound)


def fewest(problem: Problem, cell_s: float, startup_s: float, need: int) -> float:
    """Return replica-seconds that no schedule undercuts (see the module's text)."""
    instance, cost = problem.instance, problem.cost_model
    assert isinstance(cost, BatchCost)
    alone = most_within(instance, cost, None, instance.n + 1)
    if alone < need:
        raise UsageError(
            f"SLO: found {instance.n - alone} of {instance.n} requests that cannot be within "
            "theirs even alone; expected longer limits, or a smaller attainment"
        )

    limits = all_limits(instance, None)
    later = longest_later(instance, np.minimum(limits["slo_tpot"], limits["slo_gap"]))
    first = np.minimum(limits["slo_ttft"], limits["slo_latency"])
    end = instance.release + np.minimum(limits["slo_latency"], first + later)
    charged = charges_of(instance, instance.release_times.tolist(), 0)
    slack = CLOCK * (1 + instance.release) + 1e-9
    begins = np.floor(instance.release / cell_s).astype(np.int64)
    finite = np.isfinite(end)
    span = max(float(instance.release.max()), float(end[finite].max(initial=0.0)) + 1.0)
    count = min(int(span // cell_s) + 1, 2 * MAX_CELLS)
    ends = np.where(finite, np.floor(end / cell_s), count)
    ends = np.minimum(ends, count).astype(np.int64)  # `count`: after the last cell
    values = [0.0]
    for one in cost.minorants:
        work = unavoidable_work(instance, one, charged).total * (1 - MARGIN)
        work = np.maximum(work - 2 * slack, 0.0)  # what the judge's rounding puts outside
        values.append(_program(work, begins, ends, count, (cell_s, startup_s, need)))

    return max(values)


def _program(
    work: Floats,
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    count: int,
    asked: tuple[float, float, int],
) -> float:
    """Return the dual bound of the program. Columns: machines, new ones, after the end, x, y."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    cell, startup, need = asked
    size, entries = [math.inf] * (2 * count + 1), list[tuple[int, int, float]]()
    # Rows: what cells serve, new machines, requests, the time after the last cell, classes.
    serve, fresh = 0, count
    for c in range(count):
        entries += [(serve + c, c, cell), (serve + c, count + c, -startup)]
        if c:
            entries += [(fresh + c, count + c, 1.0), (fresh + c, c, -1.0), (fresh + c, c - 1, 1.0)]

    rows, after = 2 * count + 2, 2 * count + 1
    entries.append((after, 2 * count, 1.0))
    for low, high in sorted({*zip(begins.tolist(), ends.tolist(), strict=True)}):
        mine = np.sort(work[(begins == low) & (ends == high)])
        for lot in np.array_split(mine, min(_LOTS, len(mine))):
            entries += [(2 * count, len(size), 1.0), (rows, len(size), -float(lot[0]))]
            size.append(float(len(lot)))

        for c in range(low, high + 1):
            entries.append((rows, len(size), 1.0))
            if c < count:
                entries.append((serve + c, len(size), -1.0))
            else:
                entries.append((after, len(size), -1.0))

            size.append(math.inf)

        rows += 1

    i, j, a = zip(*entries, strict=True)
    matrix = coo_array((a, (i, j)), shape=(rows, len(size))).tocsr()
    least = np.zeros(rows)
    least[2 * count] = need
    price, whole = np.zeros(len(size)), np.zeros(len(size))
    price[:count], price[2 * count], whole[:count] = cell, 1.0, 1
    found = milp(
        price,
        integrality=whole,
        bounds=Bounds(0, np.array(size)),
        constraints=LinearConstraint(matrix, least),
        options={"time_limit": _SOLVE_S},
    )
    dual = found.mip_dual_bound
    if dual is None or not math.isfinite(dual):
        return 0.0

    dual *= 1 - 1e-6
    return dual if (ends == count).any() else cell * math.ceil(dual / cell - 1e-6)


def scaled_by_threshold(
    problem: Problem, cell_s: float, startup_s: float, policy: str, threshold: int, seed: int
) -> tuple[NDArray[np.int64], int]:
    """Return the machines paid in each cell, and how many requests are within their SLOs."""
    made, info = make_policy(policy)
    instance = problem.instance
    told = instance if info.predictor is None else predict(instance, info.predictor, seed=seed)
    count = min(MAX_REPLICAS, instance.n)
    fleet = problem.hardware.times(count)
    job = Job(told, instance, problem.cost_model, seed, policy, Budget(None), fleet)
    begun = begin_on(runner_of(made), job)
    if begun is None:
        raise UsageError(f"policy {policy!r}: expected one that decides batch by batch")

    scaling = _Threshold(begun.finish, cell_s, startup_s, threshold, job.workers)
    schedule = hand_out(begun, job, scaling.place)
    with warnings.catch_warnings():  # about the range of the cost model
        warnings.simplefilter("ignore")
        judged = evaluate(replace(problem, fleet=problem.fleet.times(count)), schedule)

    good = served_well(judged)
    paid = scaling.paid(np.asarray(judged.clock.finish))
    return paid, 0 if good is None else int(good.sum())


class _Threshold:
    """Decides at the end of each cell how many machines there are, and who serves a request."""

    def __init__(
        self, finish: Floats, cell: float, startup: float, threshold: int, limit: int
    ) -> None:
        self.finish, self.cell, self.startup = finish, cell, startup
        self.threshold, self.limit = threshold, limit
        self.home = np.full(len(finish), -1)
        self.since = [-math.inf]  # when each machine that is kept began
        self.counts = [1]  # machines kept in each cell so far

    def place(self, request: int, now: float) -> int:
        """Return the machine of a request that is released now."""
        while len(self.counts) * self.cell <= now:
            self._decide(len(self.counts) * self.cell)

        ready = [w for w, begun in enumerate(self.since) if begun + self.startup <= now]
        left = self.home[(self.home >= 0) & (self.finish > now)]
        loads = np.bincount(left, minlength=self.limit)
        self.home[request] = chosen = min(ready, key=lambda w: (loads[w], w))
        return chosen

    def _decide(self, now: float) -> None:
        left = int(((self.home >= 0) & (self.finish > now)).sum())
        wanted = min(self.limit, max(1, -(-left // self.threshold)))
        self.since = self.since[:wanted] + [now] * (wanted - len(self.since))
        self.counts.append(wanted)

    def paid(self, finish: Floats) -> NDArray[np.int64]:
        """Return the machines that are paid in each cell: kept, or still busy with a request."""
        count = max(len(self.counts), int(finish.max() // self.cell) + 1)
        kept = np.zeros((count, self.limit), dtype=bool)
        for c, wanted in enumerate(self.counts):
            kept[c, :wanted] = True

        kept[len(self.counts) :, 0] = True  # one stays to the end
        last = np.floor(finish / self.cell).astype(np.int64)
        for worker, c in zip(self.home.tolist(), last.tolist(), strict=True):
            while c >= 0 and not kept[c, worker]:
                kept[c, worker], c = True, c - 1

        return kept.sum(axis=1)
