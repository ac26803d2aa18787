"""Few requests in rounds: improve a schedule by CP-SAT, a dozen requests free at a time.

**The neighbourhood.** Some requests are freed, the others keep their starts. The freed ones may go
anywhere: a bound on the sum of their completions, the present one, is the only horizon, which cuts
off no schedule that is at least as good.

**The model.** The KV in use falls only after a completion, so it is enough to keep the capacity
in the rounds of completions. With c the completion and p the peak, request j holds
p_j - (c_j - c_i) in round c_i if c_j - o_j < c_i <= c_j, and nothing otherwise. So each pair has
a Boolean for who completes first (the one of the smaller index, if both do), and one for whether
the other has started by then, and the row of i is p_i + sum_j u_ij <= M with
u_ij >= p_j - c_j + c_i where j has started. This takes a few Booleans and one integer per pair,
where a staircase of intervals takes one interval per token, and CP-SAT solves it in half the time.
If p_i + p_j > M, c_j - c_i >= min(o_j, p_i + p_j - M) for i first
(`optsched.optimize.formulations.rounds.cpsat`). Of the fixed requests only the profile counts in
each other's rows, and a freed one has only completions that fit the profile.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.optimize.ramp.relaxation import Jobs
from optsched.optimize.search.placement import compact, fill

Starts = NDArray[np.int64]

_KINDS = ((False, 1 / 6), (False, 1 / 2), (True, 1 / 6))
"""Kinds of neighbourhood: a stretch in order of start (or of completion), and the share of the
freed requests that are drawn from all instead."""
_GROW, _SHRINK = 0.3, 0.1
"""Changes of the number freed after a subproblem solved to the end, and after one cut off."""
_SIDEWAYS = 4
"""Every so many rounds other weights than 1 look for another schedule of the same value."""
_LEAST = 4
_MOST_CELLS = 3 * 10**7
"""Largest (rounds) x (longest output): what finding the domain of one request may look at."""


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

    Other threads go on while CP-SAT solves, with one thread. Ends at once where all requests were
    free together and the subproblem solved to the end: the schedule is optimal then. Deterministic
    from ``rng`` if ``rounds`` ends the search.

    Parameters
    ----------
    jobs : Jobs
    starts : ndarray of int64, shape (n,)
        A feasible schedule.
    rng : numpy.random.Generator
        No other thread may draw from it meanwhile.
    deadline : float
        Of `time.perf_counter`; it also ends a running subproblem.
    stop : ndarray of int8, shape (1,), optional
        Another thread sets it to 1: the search ends after the subproblem at hand (`work`).
    rounds : int, optional
        Most subproblems.
    size : int
        Requests freed at first; more as long as subproblems are solved to the end, fewer if not.
    work : float
        Limit of a subproblem in CP-SAT's deterministic time; at 0.03 they took 0.06 s on average.

    Returns
    -------
    ndarray of int64, shape (n,)
        ``starts`` itself where there is one request or the time axis is too long.

    Raises
    ------
    ValueError
        ``starts`` is not feasible, or no end is given.
    """
    if not jobs.feasible(starts):
        raise ValueError("starts: not a feasible schedule")
    if rounds is None and deadline == math.inf and stop is None:
        raise ValueError("rounds, deadline, stop: none given, the search would not end")
    starts = starts.astype(np.int64)
    if jobs.n == 1 or jobs.rounds * int(jobs.output.max()) > _MOST_CELLS:
        return starts
    value = jobs.total(starts)
    sizes = [float(size)] * len(_KINDS)
    done = 0
    while (
        (rounds is None or done < rounds)
        and time.perf_counter() < deadline
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
    # Stretches that would stick out at an end are moved there, so that the ends get their turns.
    first = int(rng.integers(-(stretch // 2), jobs.n - stretch + stretch // 2 + 1))
    first = min(max(first, 0), jobs.n - stretch)
    chosen = np.zeros(jobs.n, dtype=bool)
    chosen[order[first : first + stretch]] = True
    others = np.flatnonzero(~chosen)
    chosen[rng.permutation(others)[: size - stretch]] = True
    return np.flatnonzero(chosen)


def _completions(jobs: Jobs, i: int, used: Starts) -> NDArray[np.int64]:
    """Return the completions of a request that fit a profile, in rising order."""
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
    """Return the best starts found, no worse than given, and whether the search space was
    exhausted: least weighted sum of completions of those freed."""
    from ortools.sat.python import cp_model as cp

    model = cp.CpModel()
    n, capacity = jobs.n, jobs.capacity
    output, peak = jobs.output.tolist(), jobs.peak.tolist()
    ends = starts + jobs.output
    end = ends.tolist()
    free = np.zeros(n, dtype=bool)
    free[freed] = True
    # Beyond everything fixed and arrived, and one after the other, all freed ones have room.
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
        """Let i complete no later than j, if all of ``given`` hold."""
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
        parameters.max_time_in_seconds = max(0.0, deadline - time.perf_counter())
    # It costs more than it saves in problems of a tenth of a second.
    parameters.cp_model_presolve = False
    parameters.catch_sigint_signal = False
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return None, False
    found = starts.copy()
    found[freed] = [solver.value(c) for c in variables]
    found[freed] -= jobs.output[freed]
    return found, bool(status == cp.OPTIMAL)


@njit(cache=True, nogil=True)
def _compact(arrival: Any, base: Any, output: Any, capacity: int, starts: Any) -> None:
    """Move each request to its earliest feasible start, in order of start, until none moves."""
    use = np.zeros((starts + output).max() + 2, dtype=np.int64)
    fill(output, base, use, starts)
    while compact(arrival, output, base, capacity, use, starts, np.argsort(starts)) > 0:
        pass
