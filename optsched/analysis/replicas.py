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

With a tabulated cost model the work is that under a minorant: a linear model under which no batch
takes longer. Each proves a value.

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

    # 0.99 * 100 may come out a little above 99.
    need = math.ceil(attainment * problem.instance.n - 1e-9)
    bound = fewest(problem, cell_s, startup_s, need)
    for threshold in _THRESHOLDS:  # the largest first: the first that will do is the cheapest
        paid, in_time = scale_by_threshold(problem, cell_s, startup_s, policy, threshold, seed)
        if in_time >= need:
            return Replicas(
                policy,
                cell_s,
                startup_s,
                bound,
                value=cell_s * float(paid.sum()),
                threshold=threshold,
                attainment=in_time / problem.instance.n,
                replicas=tuple(paid.tolist()),
            )

    return Replicas(policy, cell_s, startup_s, bound)


def fewest(problem: Problem, cell_s: float, startup_s: float, need: int) -> float:
    """Return replica-seconds that no schedule undercuts (see the module's text).

    `cell_s`, `startup_s`: seconds of a cell, and of a start-up, which is at most a cell. `need`:
    how many requests must be within their SLOs.
    """
    instance, cost = problem.instance, problem.cost_model
    assert isinstance(cost, BatchCost)
    # With more machines than requests, each request may have one of its own. None: the SLOs are the
    # instance's, as in the next step.
    alone = most_within(instance, cost, None, instance.n + 1)
    if alone < need:
        raise UsageError(
            f"SLO: found {instance.n - alone} of {instance.n} requests that cannot be within "
            "theirs even alone; expected longer limits, or a smaller attainment"
        )

    # Windows [a_i, d_i]: the first token as late as may be, and then steps as long as may be.
    limits = all_limits(instance, None)
    later = longest_later(instance, np.minimum(limits["slo_tpot"], limits["slo_gap"]))
    first = np.minimum(limits["slo_ttft"], limits["slo_latency"])
    deadline = instance.release + np.minimum(limits["slo_latency"], first + later)

    # The cells from the first to the last one that each window meets. What ends beyond the
    # ``count`` cells of the program counts as ending after the last one.
    first_cell = np.floor(instance.release / cell_s).astype(np.int64)
    finite = np.isfinite(deadline)
    span = max(float(instance.release.max()), float(deadline[finite].max(initial=0.0)) + 1.0)
    count = min(int(span // cell_s) + 1, 2 * MAX_CELLS)
    last_cell = np.where(finite, np.floor(deadline / cell_s), count)
    last_cell = np.minimum(last_cell, count).astype(np.int64)  # `count`: after the last cell

    # What each request pays of prefixes that it shares; None where no KV can be shared. As SLOs
    # count from each arrival, only those that arrive together share what they pay (0).
    charged = charges_of(instance, instance.release_times.tolist(), 0)
    # As in `optsched.bounds.service`, work is less by `MARGIN` and windows are wider by about
    # `CLOCK`, for the rounding of the judge's clock.
    slack = CLOCK * (1 + instance.release) + 1e-9
    # Each minorant of the cost model proves a value of its own, and 0 always holds.
    values = [0.0]
    for minorant in cost.minorants:
        work = unavoidable_work(instance, minorant, charged).total * (1 - MARGIN)
        # The judge's rounding may put so much outside at either end of a window.
        work = np.maximum(work - 2 * slack, 0.0)
        values.append(_solve_program(work, first_cell, last_cell, count, (cell_s, startup_s, need)))

    return max(values)


def _solve_program(
    work: Floats,
    first_cell: NDArray[np.int64],
    last_cell: NDArray[np.int64],
    count: int,
    limits: tuple[float, float, int],
) -> float:
    """Return the dual bound of the program, 0 if the solver has none.

    `work`, `first_cell`, `last_cell`: of each request. `count`: the number of cells; as a request's
    last cell, the time after them. `limits`: seconds of a cell and of a start-up, and how many
    requests must be in time.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    cell, startup, need = limits
    # Columns: machines and new ones by cell, the time after the last cell, and below for each class
    # the x of its lots and its y by cell. ``upper`` has their upper bounds.
    after_column = 2 * count
    upper = [math.inf] * (2 * count + 1)
    # Rows (at least 0, but for ``need_row``): what cells serve, new machines by cell, requests in
    # time, the time after the last cell, and below one for each class.
    new_rows, need_row, after_row = count, 2 * count, 2 * count + 1
    row_count = 2 * count + 2
    entries: list[tuple[int, int, float]] = [  # row, column, coefficient
        (after_row, after_column, 1.0)
    ]
    # cell N(c) - startup new(c) - (what is served in c) >= 0, and new(c) >= N(c) - N(c - 1).
    for c in range(count):
        entries += [(c, c, cell), (c, count + c, -startup)]
        if c:  # machines of the first cell are there at once, so none of them is new
            new_row = new_rows + c
            entries += [(new_row, count + c, 1.0), (new_row, c, -1.0), (new_row, c - 1, 1.0)]

    windows = sorted({*zip(first_cell.tolist(), last_cell.tolist(), strict=True)})
    for low, high in windows:
        class_row = row_count
        row_count += 1
        works = np.sort(work[(first_cell == low) & (last_cell == high)])
        for lot in np.array_split(works, min(_LOTS, len(works))):
            # All of a lot count with its smallest work, so that the value stays a bound.
            entries += [(need_row, len(upper), 1.0), (class_row, len(upper), -float(lot[0]))]
            upper.append(float(len(lot)))

        # What the class is served, summed over its cells, is at least the work of its lots.
        for c in range(low, high + 1):
            serving_row = c if c < count else after_row
            entries += [(class_row, len(upper), 1.0), (serving_row, len(upper), -1.0)]
            upper.append(math.inf)

    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(row_count, len(upper))).tocsr()
    lower = np.zeros(row_count)
    lower[need_row] = need
    price, is_whole = np.zeros(len(upper)), np.zeros(len(upper))
    price[:count] = cell
    price[after_column] = 1.0
    is_whole[:count] = 1
    solution = milp(
        price,
        integrality=is_whole,
        bounds=Bounds(0, np.array(upper)),
        constraints=LinearConstraint(matrix, lower),
        options={"time_limit": _SOLVE_S},
    )
    dual = solution.mip_dual_bound
    if dual is None or not math.isfinite(dual):
        return 0.0

    dual *= 1 - 1e-6  # the solver's tolerance
    if (last_cell == count).any():
        return float(dual)  # time after the last cell is paid as it is used

    return cell * math.ceil(dual / cell - 1e-6)


def scale_by_threshold(
    problem: Problem, cell_s: float, startup_s: float, policy: str, threshold: int, seed: int
) -> tuple[NDArray[np.int64], int]:
    """Return the machines paid in each cell, and how many requests are within their SLOs.

    `threshold`: the unfinished requests for which a machine is kept. The others: as of
    `replica_hours`.
    """
    scheduler, info = make_policy(policy)
    instance = problem.instance
    predicted = instance if info.predictor is None else predict(instance, info.predictor, seed=seed)
    # The simulation has a machine for each request, up to a limit, and scaling says which serve.
    count = min(MAX_REPLICAS, instance.n)
    fleet = problem.hardware.times(count)
    job = Job(predicted, instance, problem.cost_model, seed, policy, Budget(None), fleet)
    begun = begin_on(runner_of(scheduler), job)
    if begun is None:
        raise UsageError(f"policy {policy!r}: expected one that decides batch by batch")

    scaling = _Threshold(begun.finish, cell_s, startup_s, threshold, job.workers)
    # Asks `place` for the machine of each request when it is released, and runs all to the end.
    schedule = hand_out(begun, job, scaling.place)
    with warnings.catch_warnings():  # about the range of the cost model
        warnings.simplefilter("ignore")
        judged = evaluate(replace(problem, fleet=problem.fleet.times(count)), schedule)

    in_time = served_well(judged)
    paid = scaling.paid_machines(np.asarray(judged.clock.finish))
    return paid, 0 if in_time is None else int(in_time.sum())


class _Threshold:
    """Decides at the end of each cell how many machines there are, and who serves a request.

    `finish`: when each request has ended, which the simulation writes while it runs. `threshold`:
    the unfinished requests for which a machine is kept. `limit`: the most machines.
    """

    def __init__(
        self, finish: Floats, cell: float, startup: float, threshold: int, limit: int
    ) -> None:
        self.finish = finish
        self.cell, self.startup = cell, startup
        self.threshold, self.limit = threshold, limit
        self.home = np.full(len(finish), -1)  # the machine of each request, -1: none yet
        self.since = [-math.inf]  # when each machine that is kept began
        self.counts = [1]  # machines kept in each cell so far

    def place(self, request: int, now: float) -> int:
        """Return the machine of a request that is released now."""
        # First comes what is decided at the end of each cell that is over by now.
        while len(self.counts) * self.cell <= now:
            self._decide(len(self.counts) * self.cell)

        # Machine 0 is always kept, so that one is ready.
        ready = [w for w, begun in enumerate(self.since) if begun + self.startup <= now]
        # Unfinished requests by machine.
        loads = np.bincount(self.home[self._unfinished(now)], minlength=self.limit)
        chosen = min(ready, key=lambda w: (loads[w], w))
        self.home[request] = chosen
        return chosen

    def _unfinished(self, now: float) -> NDArray[np.bool_]:
        """Return which requests are on a machine and have not ended."""
        return (self.home >= 0) & (self.finish > now)

    def _decide(self, now: float) -> None:
        """Set the machines of the next cell. The newest are given up first."""
        wanted = -(-int(self._unfinished(now).sum()) // self.threshold)  # rounded up
        wanted = min(self.limit, max(1, wanted))
        self.since = self.since[:wanted] + [now] * (wanted - len(self.since))
        self.counts.append(wanted)

    def paid_machines(self, finish: Floats) -> NDArray[np.int64]:
        """Return the machines that are paid in each cell: kept, or still busy with a request.

        `finish`: when each request has ended, as judged. ``counts`` are the machines kept in each
        cell, always the first ones, and ``home`` is the machine of each request.
        """
        count = max(len(self.counts), int(finish.max() // self.cell) + 1)
        is_paid = np.zeros((count, self.limit), dtype=bool)  # by cell and machine
        for c, wanted in enumerate(self.counts):
            is_paid[c, :wanted] = True

        is_paid[len(self.counts) :, 0] = True  # one stays to the end
        last_cell = np.floor(finish / self.cell).astype(np.int64)
        for worker, c in zip(self.home.tolist(), last_cell.tolist(), strict=True):
            # Backwards from the end of the request to a cell in which the machine is kept anyway.
            while c >= 0 and not is_paid[c, worker]:
                is_paid[c, worker] = True
                c -= 1

        return is_paid.sum(axis=1)
