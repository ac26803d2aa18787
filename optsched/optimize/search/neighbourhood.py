"""Improve a schedule of few requests in rounds by CP-SAT, a dozen free requests at a time.

**The neighbourhood.** Some requests are freed, and the others keep their starts. The only horizon
of the freed requests is their present sum of completions. It cuts off no schedule that is at least
as good.

**The model.** The KV in use falls only after a completion. So it is enough to keep the capacity in
the rounds of completions. Let c be the completion and p the peak. In round c_i, request j holds
p_j - (c_j - c_i) if c_j - o_j < c_i <= c_j, and nothing otherwise. So each pair has two Booleans.
One says who completes first; at a tie it is the request of smaller index. The other says whether
the second request has started by then. The row of i is p_i + sum_j u_ij <= M, with
u_ij >= p_j - c_j + c_i if j has started.

This takes a few Booleans and one integer per pair, while a staircase of intervals takes one
interval per token. CP-SAT solves it in half the time. If p_i + p_j > M and i completes first,
c_j - c_i >= min(o_j, p_i + p_j - M) (`optsched.optimize.formulations.rounds.cpsat`). The fixed
requests enter the rows as a profile, and a freed request has only completions that fit the profile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.jobs import Jobs
from optsched.optimize.search.placement import compact, fill
from optsched.problem.budget import work_time
from optsched.problem.kernel import njit

Starts = NDArray[np.int64]

_KINDS = ((False, 1 / 6), (False, 1 / 2), (True, 1 / 6))
"""Kinds of neighbourhood: whether the stretch is in order of start or of completion, and the share
of the freed requests that are drawn from all requests instead."""
_GROW, _SHRINK = 0.3, 0.1
"""Factors of the number of freed requests after a subproblem is solved, and after one is cut off.
"""
_SIDEWAYS = 4
"""Once in so many rounds, random weights look for another schedule of the same value."""
_LEAST = 4
_MOST_CELLS = 3 * 10**7
"""The max of (rounds) x (longest output), which is the work of finding a request's domain."""


def improve(
    jobs: Jobs,
    starts: Starts,
    *,
    rng: np.random.Generator,
    deadline: float = math.inf,
    stop: NDArray[np.int8] | None = None,
    rounds: int | None = None,
    size: int = 8,
    work: float = 0.03,
) -> Starts:
    """Return a schedule that is at least as good, by solving neighbourhoods with CP-SAT.

    CP-SAT uses one thread, and other threads go on meanwhile. If all requests were free together
    and the subproblem was solved, the schedule is optimal and the search ends at once. The search
    is deterministic from ``rng`` if ``rounds`` ends it.

    Parameters
    ----------
    jobs : Jobs
    starts : ndarray of int64, shape (n,)
        A feasible schedule.
    rng : numpy.random.Generator
        No other thread may draw from it meanwhile.
    deadline : float
        A time of `optsched.problem.budget.work_time`. It also ends a running subproblem.
    stop : ndarray of int8, shape (1,), optional
        If another thread sets it to 1, the search ends after the present subproblem (`work`).
    rounds : int, optional
        The max number of subproblems.
    size : int
        The number of requests freed at first. It grows while subproblems are solved, and shrinks
        after one that is not.
    work : float
        Limit of a subproblem in CP-SAT's deterministic time; at 0.03 they took 0.06 s on average.

    Returns
    -------
    ndarray of int64, shape (n,)
        ``starts`` itself if there is one request or the time axis is too long.

    Raises
    ------
    ValueError
        ``starts`` is not feasible, or no end is given.
    """
    if not jobs.feasible(starts):
        raise ValueError("starts: found no feasible schedule; expected one")
    if rounds is None and deadline == math.inf and stop is None:
        raise ValueError("rounds, deadline, stop: found none; expected one that ends the search")
    starts = starts.astype(np.int64)
    if jobs.n == 1 or jobs.rounds * int(jobs.output.max()) > _MOST_CELLS:
        return starts
    value = jobs.total(starts)
    sizes = [float(size)] * len(_KINDS)
    done = 0
    while (
        (rounds is None or done < rounds)
        and work_time() < deadline
        and not (stop is not None and stop[0])
    ):
        kind = done % len(_KINDS)
        freed = _freed(jobs, starts, rng, round(sizes[kind]), *_KINDS[kind])
        sideways = done % _SIDEWAYS == _SIDEWAYS - 1
        weights = rng.integers(10, 20, len(freed)) if sideways else np.ones(len(freed), np.int64)
        seed = int(rng.integers(2**31))
        found, ended = _solve(jobs, starts, freed, weights, work, deadline, seed)
        done += 1
        if found is not None and jobs.feasible(found):
            _compact(jobs.arrival, jobs.first_kv - 1, jobs.output, jobs.capacity, found)
            total = jobs.total(found)
            if total <= value and jobs.feasible(found):
                starts, value = found, total
        if ended and not sideways and len(freed) == jobs.n:
            break
        change = _GROW if ended else -_SHRINK
        sizes[kind] = min(max(sizes[kind] + change, _LEAST), jobs.n)
    return starts


def _freed(
    jobs: Jobs, starts: Starts, rng: np.random.Generator, size: int, by_start: bool, share: float
) -> NDArray[np.int64]:
    """Return the requests to free, in order of index."""
    size = min(size, jobs.n)
    order = np.argsort(starts if by_start else starts + jobs.output, kind="stable")
    stretch = size - int(share * size)
    # A stretch that would pass an end is moved to it, so that requests there are freed as well.
    first = int(rng.integers(-(stretch // 2), jobs.n - stretch + stretch // 2 + 1))
    first = min(max(first, 0), jobs.n - stretch)
    chosen = np.zeros(jobs.n, dtype=bool)
    chosen[order[first : first + stretch]] = True
    others = np.flatnonzero(~chosen)
    chosen[rng.permutation(others)[: size - stretch]] = True
    return np.flatnonzero(chosen)


def _completions(jobs: Jobs, i: int, used: Starts) -> NDArray[np.int64]:
    """Return the completions of a request that fit a profile, in increasing order."""
    o, at = int(jobs.output[i]), int(jobs.arrival[i])
    fits = np.ones(len(used) - o - at, dtype=bool)
    for d in range(o):
        room = jobs.capacity - int(jobs.first_kv[i]) - d
        fits &= used[at + 1 + d : at + 1 + d + len(fits)] <= room
    return np.flatnonzero(fits) + at + o


def _domain(values: NDArray[np.int64]) -> Any:
    from ortools.sat.python import cp_model as cp

    cut = np.flatnonzero(np.diff(values) > 1)
    first = values[np.concatenate(([0], cut + 1))]
    last = values[np.concatenate((cut, [-1]))]
    return cp.Domain.from_intervals(np.stack([first, last], axis=1).tolist())


def _solve(
    jobs: Jobs,
    starts: Starts,
    freed: NDArray[np.int64],
    weights: NDArray[np.int64],
    work: float,
    deadline: float,
    seed: int,
) -> tuple[Starts | None, bool]:
    """Minimize the weighted sum of completions of the freed requests.

    Return the best starts found, which are no worse than the given ones, and whether the
    subproblem was solved to the end.
    """
    from ortools.sat.python import cp_model as cp

    model = cp.CpModel()
    n, capacity = jobs.n, jobs.capacity
    output, peak = jobs.output.tolist(), jobs.peak.tolist()
    ends = starts + jobs.output
    end = ends.tolist()
    free = np.zeros(n, dtype=bool)
    free[freed] = True
    # All freed requests have room one after another, after the last arrival and all fixed requests.
    rounds = int(max(ends.max(), jobs.arrival.max()) + jobs.output[freed].sum()) + 2
    used = jobs.used(starts, rounds, np.flatnonzero(~free))
    fitting = {i: _completions(jobs, i, used) for i in freed.tolist()}
    present = int(ends[freed].sum())
    spare = present - sum(int(values[0]) for values in fitting.values())
    at: list[Any] = list(end)
    low, high = list(end), list(end)
    for i, values in fitting.items():
        values = values[values <= values[0] + spare]
        at[i] = model.new_int_var_from_domain(_domain(values), "")
        model.add_hint(at[i], end[i])
        low[i], high[i] = int(values[0]), int(values[-1])
    held: list[list[Any]] = [[] for _ in range(n)]

    def before(i: int, j: int, given: list[Any]) -> None:
        """Make i complete no later than j if all of ``given`` hold."""
        if low[j] - output[j] >= high[i]:
            return
        excess = peak[i] + peak[j] - capacity
        if excess > 0:
            apart = model.add(at[j] - at[i] >= min(output[j], excess))
            apart.only_enforce_if(given)
        if excess >= output[j]:
            return
        share = model.new_int_var(0, max(0, min(peak[j], capacity - peak[i])), "")
        runs = model.new_bool_var("")
        model.add(at[j] - at[i] >= output[j]).only_enforce_if([*given, ~runs])
        model.add(share >= at[i] - at[j] + peak[j]).only_enforce_if([*given, runs])
        held[i].append(share)

    for i in range(n):
        for j in range(i + 1, n):
            if not (free[i] or free[j]):
                continue
            if low[j] - output[j] >= high[i] or low[i] - output[i] >= high[j]:
                continue
            if high[i] <= low[j]:
                before(i, j, [])
            elif high[j] < low[i]:
                before(j, i, [])
            else:
                first = model.new_bool_var("")
                model.add(at[i] <= at[j]).only_enforce_if(first)
                model.add(at[j] < at[i]).only_enforce_if(~first)
                before(i, j, [first])
                before(j, i, [~first])
    for i in range(n):
        if held[i]:
            own = peak[i] if free[i] else int(used[end[i]])
            model.add(sum(held[i]) <= capacity - own)
    variables = [at[i] for i in freed.tolist()]
    model.add(sum(variables) <= present)
    model.minimize(sum(w * c for w, c in zip(weights.tolist(), variables, strict=True)))

    solver = cp.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = seed
    parameters.max_deterministic_time = work
    if deadline < math.inf:
        parameters.max_time_in_seconds = max(0.0, deadline - work_time())
    # The presolve costs more than it saves in problems of a tenth of a second.
    parameters.cp_model_presolve = False
    parameters.catch_sigint_signal = False
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return None, False
    found = starts.copy()
    found[freed] = [solver.value(c) for c in variables]
    found[freed] -= jobs.output[freed]
    return found, bool(status == cp.OPTIMAL)


@njit(nogil=True)
def _compact(arrival: Any, base: Any, output: Any, capacity: int, starts: Any) -> None:
    """Move each request to its earliest feasible start, in order of start, until none moves."""
    use = np.zeros((starts + output).max() + 2, dtype=np.int64)
    fill(output, base, use, starts)
    while compact(arrival, output, base, capacity, use, starts, np.argsort(starts)) > 0:
        pass
