"""The hindsight program for CP-SAT: one start per request and a staircase of intervals.

A request that starts at k holds first + d tokens of KV in round k + 1 + d, for d = 0 .. o - 1. In
the cumulative constraint, the whole run [k, k + o) demands first = s + offset tokens. Each of the
intervals [k + d, k + o), for d = 1 .. o - 1, demands one token more.

For the most requests in time every request may be absent. A literal says that it is present, and
rows about it hold only then.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from optsched.optimize.formulations.base import Answer, Task
from optsched.optimize.formulations.rounds.horizon import RoundData
from optsched.optimize.formulations.rounds.integer_program import Program, answer, program_of
from optsched.optimize.solvers.base import SolveOptions
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.memory import check_size

_INTERVAL_BYTES, _PAIR_BYTES = 1000, 1000
"""The bytes of an interval, and of a pair of requests that are kept apart."""
_DOING = "the model was built"


def solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    """Solve the hindsight program by CP-SAT."""
    from optsched.optimize.solvers.cpsat import solve_cp_model

    budget = options.budget()
    prog = program_of(task, options.warm_start)
    model, read = cp_model(prog, budget)
    raw = solve_cp_model(model, prog.left(options, budget), read=read, known=prog.known)
    starts = None
    if raw.values is not None:
        starts = np.rint(raw.values).astype(np.int64)
        if prog.on_time:
            starts, present = np.split(starts, 2)
            starts = np.where(present == 1, starts, prog.last + 1)

    return answer(prog, raw, starts)


def _check_sizes(data: RoundData) -> None:
    instance, instead = data.instance, "placement has no such limit"
    check_size(int(data.output.sum()), _INTERVAL_BYTES, "output tokens, an interval each", instead)
    pairs = int((np.bincount(data.block) ** 2).sum())

    if not data.hybrid_off:
        peak = np.sort(instance.peak_tokens)
        apart = len(peak) - np.searchsorted(peak, instance.kv_capacity - peak, side="right")
        pairs = min(pairs, int(apart.sum())) // 2

    check_size(pairs, _PAIR_BYTES, "pairs of requests that are kept apart", instead)


def cp_model(prog: Program, budget: Budget = NO_LIMIT) -> tuple[Any, list[Any]]:
    """Return the CP-SAT model and its start variables. The schedule at hand is the hint."""
    from ortools.sat.python import cp_model as cp

    data = prog.data
    _check_sizes(data)
    model = cp.CpModel()
    start = [
        model.new_int_var(int(first), int(max(first, final)), f"start_{i}")
        for i, (first, final) in enumerate(zip(data.arrival, prog.last, strict=True))
    ]
    present: list[Any] = [None] * len(start)

    if prog.on_time:
        present = [model.new_bool_var(f"present_{i}") for i in range(len(start))]
        for i in np.flatnonzero(prog.last < data.arrival).tolist():
            model.add(present[i] == 0)

    _memory(model, prog, start, present, budget)
    _separation(model, prog, start, present, budget)
    if not prog.on_time:
        _twins(model, prog, start)

    _limits(model, prog, start, present)
    if data.hybrid_off:
        _phases(model, prog, start, present, budget)

    held = (prog.warm <= prog.last).tolist()
    for i, value in enumerate(prog.warm.tolist()):
        if held[i]:
            model.add_hint(start[i], value)
        if prog.on_time:
            model.add_hint(present[i], held[i])

    if prog.on_time:
        model.minimize(-sum(present))
        return model, start + present

    model.minimize(sum(start) + int((data.output - data.arrival).sum()))
    return model, start


def _interval(model: Any, start: Any, size: int, name: str, present: Any) -> Any:
    if present is None:
        return model.new_fixed_size_interval_var(start, size, name)

    return model.new_optional_fixed_size_interval_var(start, size, present, name)


def _memory(
    model: Any, prog: Program, start: list[Any], present: list[Any], budget: Budget
) -> None:
    data = prog.data
    intervals, heights = [], []
    for i, variable in enumerate(start):
        budget.check(_DOING)
        output = int(data.output[i])
        intervals += [
            _interval(model, variable + d, output - d, f"kv_{i}_{d}", present[i])
            for d in range(output)
        ]
        heights += [int(data.first_kv[i])] + [1] * (output - 1)

    model.add_cumulative(intervals, heights, int(data.instance.kv_capacity))


def _separation(
    model: Any, prog: Program, start: list[Any], present: list[Any], budget: Budget
) -> None:
    """Separate the completions of two requests whose peaks exceed the capacity together.

    Let c be the completion and p the peak, which is s + o in generated and s + o - 1 in cached
    accounting. Claim: if c_i <= c_j, then c_j - c_i >= min(o_j, p_i + p_j - M).

    Proof. Either j starts at c_i or later; then c_j - c_i >= o_j. Or j runs in round c_i. In that
    round i holds p_i, and j holds p_j - (c_j - c_i), since a run gains one token per round up to
    its peak. Together they hold at most M.

    The argument only uses the capacity, so it stays valid under further limits.
    """
    data = prog.data
    peak, output = data.instance.peak_tokens, data.output
    capacity = data.instance.kv_capacity
    end = [variable + int(o) for variable, o in zip(start, output, strict=True)]

    for i in range(len(start)):
        budget.check(_DOING)
        for j in range(i + 1, len(start)):
            excess = int(peak[i] + peak[j]) - capacity
            if excess <= 0 or data.block[i] != data.block[j]:
                continue

            first = model.new_bool_var(f"first_{i}_{j}")
            both = _both(present, i, j)
            after = min(int(output[j]), excess)
            model.add(end[j] >= end[i] + after).only_enforce_if(first, *both)
            before = min(int(output[i]), excess)
            model.add(end[i] >= end[j] + before).only_enforce_if(~first, *both)


def _both(present: list[Any], i: int, j: int) -> list[Any]:
    return [literal for literal in (present[i], present[j]) if literal is not None]


def _twins(model: Any, prog: Program, start: list[Any]) -> None:
    """Order the starts of requests with equal prompt and output by arrival, then by index.

    No optimum is lost. Suppose that i arrives no later than j but starts after it. Then the two can
    exchange their starts, since a_i <= a_j <= start_j and a_j <= start_j < start_i. Every round
    runs the same requests up to their names, and the total latency stays the same.
    """
    data = prog.data
    order = np.lexsort((np.arange(len(start)), data.arrival, data.output, data.prompt)).tolist()
    for i, j in pairwise(order):
        if data.prompt[i] == data.prompt[j] and data.output[i] == data.output[j]:
            model.add(start[i] <= start[j])


def _limits(model: Any, prog: Program, start: list[Any], present: list[Any]) -> None:
    data = prog.data
    limits = data.instance.limits
    if not limits.as_dict():
        return

    run = [
        _interval(model, k, int(o), f"run_{i}", present[i])
        for i, (k, o) in enumerate(zip(start, data.output, strict=True))
    ]
    prefill = [_interval(model, k, 1, f"prefill_{i}", present[i]) for i, k in enumerate(start)]
    prompt = data.prompt.tolist()
    ones = [1] * len(start)
    if limits.max_running is not None:
        model.add_cumulative(run, ones, limits.max_running)
    if limits.max_prefill_tokens is not None:
        model.add_cumulative(prefill, prompt, limits.max_prefill_tokens)
    if limits.max_batch_tokens is not None:
        extra = [s - 1 for s in prompt]
        model.add_cumulative(run + prefill, ones + extra, limits.max_batch_tokens)


def _phases(
    model: Any, prog: Program, start: list[Any], present: list[Any], budget: Budget
) -> None:
    """Forbid j to start while i decodes: it starts no later than i, or after i has ended."""
    data = prog.data
    for i, k in enumerate(start):
        budget.check(_DOING)
        if data.output[i] == 1:
            continue
        for j, other in enumerate(start):
            if i != j and data.block[i] == data.block[j]:
                behind = model.new_bool_var(f"behind_{i}_{j}")
                both = _both(present, i, j)
                model.add(other >= k + int(data.output[i])).only_enforce_if(behind, *both)
                model.add(other <= k).only_enforce_if(~behind, *both)
