"""The hindsight program for CP-SAT: one start per request and a staircase of intervals.

A request that starts at k holds first + d tokens of KV in round k + 1 + d, for d = 0 .. o - 1. In
the cumulative constraint, the whole run [k, k + o) demands first = s + offset tokens. Each of the
intervals [k + d, k + o), for d = 1 .. o - 1, demands one token more.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any

import numpy as np

from optsched.optimize.formulations.base import Answer, Task
from optsched.optimize.formulations.rounds.integer_program import Program, answer, program
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import UsageError

MAX_INTERVALS = 2_000_000
"""The max number of output tokens of a model. Each takes about a kilobyte."""


def solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    """Solve the hindsight program by CP-SAT.

    Parameters
    ----------
    task : Task
    options : SolveOptions

    Returns
    -------
    Answer

    Raises
    ------
    UsageError
        There are more than `MAX_INTERVALS` output tokens; see also `program`.
    InfeasibleError
        See `program`.
    """
    from optsched.optimize.solvers.cpsat import cpsat_version, solve_cp_model

    begin = time.perf_counter()
    tokens = int(task.instance.output_tokens.sum())
    if tokens > MAX_INTERVALS:
        raise UsageError(
            f"method: found {tokens:.2g} output tokens, an interval each in the CP-SAT model; "
            f"expected at most {MAX_INTERVALS:.2g} (placement has no such limit)"
        )
    prog = program(task.instance, warm_start=options.warm_start)
    try:
        model, start = cp_model(prog, deadline=begin + options.time_limit)
    except TimeoutError as late:
        build_s = time.perf_counter() - begin
        return Answer(Status.NO_INCUMBENT, native_status=str(late), build_s=build_s)
    build_s = time.perf_counter() - begin
    raw = solve_cp_model(model, options.after(build_s), read=start, build_s=build_s)
    starts = None if raw.values is None else np.rint(raw.values).astype(np.int64)
    return answer(prog, raw, starts, versions={"ortools": cpsat_version()})


def cp_model(prog: Program, *, deadline: float = math.inf) -> tuple[Any, list[Any]]:
    """Return the CP-SAT model and its start variables. The schedule at hand is the hint.

    Parameters
    ----------
    prog : Program
    deadline : float
        A time of `time.perf_counter`.

    Returns
    -------
    model : ortools.sat.python.cp_model.CpModel
    start : list of variables
        One per request, in the model's time.

    Raises
    ------
    TimeoutError
        The deadline came before the model was complete.
    """
    from ortools.sat.python import cp_model as cp

    data = prog.data
    model = cp.CpModel()
    start = [
        model.new_int_var(int(first), int(final), f"start_{i}")
        for i, (first, final) in enumerate(zip(data.arrival, prog.last, strict=True))
    ]
    _memory(model, prog, start, deadline)
    _separation(model, prog, start, deadline)
    _twins(model, prog, start)
    _limits(model, prog, start)
    if data.hybrid_off:
        _phases(model, prog, start)
    for variable, value in zip(start, prog.warm.tolist(), strict=True):
        model.add_hint(variable, value)
    model.minimize(sum(start) + int((data.output - data.arrival).sum()))
    return model, start


def _check(deadline: float) -> None:
    if time.perf_counter() > deadline:
        raise TimeoutError("the time limit came while the model was built")


def _memory(model: Any, prog: Program, start: list[Any], deadline: float) -> None:
    data = prog.data
    intervals, heights = [], []
    for i, variable in enumerate(start):
        _check(deadline)
        output = int(data.output[i])
        intervals += [
            model.new_fixed_size_interval_var(variable + d, output - d, f"kv_{i}_{d}")
            for d in range(output)
        ]
        heights += [int(data.first_kv[i])] + [1] * (output - 1)
    model.add_cumulative(intervals, heights, int(data.instance.kv_capacity))


def _separation(model: Any, prog: Program, start: list[Any], deadline: float) -> None:
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
        _check(deadline)
        for j in range(i + 1, len(start)):
            excess = int(peak[i] + peak[j]) - capacity
            if excess <= 0 or data.block[i] != data.block[j]:
                continue
            first = model.new_bool_var(f"first_{i}_{j}")
            after = min(int(output[j]), excess)
            model.add(end[j] >= end[i] + after).only_enforce_if(first)
            before = min(int(output[i]), excess)
            model.add(end[i] >= end[j] + before).only_enforce_if(~first)


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


def _limits(model: Any, prog: Program, start: list[Any]) -> None:
    data = prog.data
    limits = data.instance.limits
    if not limits.as_dict():
        return
    run = [
        model.new_fixed_size_interval_var(k, int(o), f"run_{i}")
        for i, (k, o) in enumerate(zip(start, data.output, strict=True))
    ]
    prefill = [model.new_fixed_size_interval_var(k, 1, f"prefill_{i}") for i, k in enumerate(start)]
    prompt = data.prompt.tolist()
    ones = [1] * len(start)
    if limits.max_running is not None:
        model.add_cumulative(run, ones, limits.max_running)
    if limits.max_prefill_tokens is not None:
        model.add_cumulative(prefill, prompt, limits.max_prefill_tokens)
    if limits.max_batch_tokens is not None:
        extra = [s - 1 for s in prompt]
        model.add_cumulative(run + prefill, ones + extra, limits.max_batch_tokens)


def _phases(model: Any, prog: Program, start: list[Any]) -> None:
    """Forbid j to start while i decodes: it starts no later than i, or after i has ended."""
    data = prog.data
    for i, k in enumerate(start):
        if data.output[i] == 1:
            continue
        for j, other in enumerate(start):
            if i != j and data.block[i] == data.block[j]:
                behind = model.new_bool_var(f"behind_{i}_{j}")
                model.add(other >= k + int(data.output[i])).only_enforce_if(behind)
                model.add(other <= k).only_enforce_if(~behind)
