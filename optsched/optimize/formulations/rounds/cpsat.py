"""The hindsight program for CP-SAT: one start per request and a staircase of intervals.

A request that starts at k holds first + d tokens of KV in round k + 1 + d, for d = 0 .. o - 1. In
the cumulative constraint, the whole run [k, k + o) demands first = s + offset tokens. Each of the
intervals [k + d, k + o), for d = 1 .. o - 1, demands one token more.

For the most requests in time every request may be absent. A literal says that it is present, and
rows about it hold only then.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from optsched.optimize.formulations.base import Answer, Task
from optsched.optimize.formulations.rounds.goals import Goal
from optsched.optimize.formulations.rounds.horizon import RoundData
from optsched.optimize.formulations.rounds.integer_program import Program, answer, program_of
from optsched.optimize.solvers.base import SolveOptions
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.memory import check_size

# The bytes of an interval, and of a pair of requests that are kept apart.
_INTERVAL_BYTES, _PAIR_BYTES = 1000, 1000


def solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    """Solve the hindsight program by CP-SAT."""
    from optsched.optimize.solvers.cpsat import solve_cp_model

    budget = options.budget()
    prog = program_of(task, options.warm_start)
    model, read = cp_model(prog, budget)
    raw = solve_cp_model(model, prog.options_left(options, budget), read=read, known=prog.known)
    starts = None
    if raw.values is not None:
        # The variables read are the starts and, if requests may be left out, their presences.
        starts = np.rint(raw.values).astype(np.int64)
        if prog.on_time:
            starts, present = np.split(starts, 2)
            # A start after the last one in time says that the request is left out (`with_late`).
            starts = np.where(present == 1, starts, prog.last + 1)

    return answer(prog, raw, starts)


def _check_sizes(data: RoundData) -> None:
    """Refuse a model whose intervals or pairs would not fit into memory."""
    instance, instead = data.instance, "placement has no such limit"
    check_size(int(data.output.sum()), _INTERVAL_BYTES, "output tokens, an interval each", instead)
    # Without hybrid batches `separate_phases` keeps all ordered pairs of a block apart.
    pairs = int((np.bincount(data.block) ** 2).sum())

    # Else `separate_ends` keeps those apart whose peaks do not fit together. ``apart`` counts for
    # each request all such others, so both numbers count each pair twice.
    if not data.hybrid_off:
        peak = np.sort(instance.peak_tokens)
        apart = len(peak) - np.searchsorted(peak, instance.kv_capacity - peak, side="right")
        pairs = min(pairs, int(apart.sum())) // 2

    check_size(pairs, _PAIR_BYTES, "pairs of requests that are kept apart", instead)


def cp_model(prog: Program, budget: Budget = NO_LIMIT) -> tuple[Any, list[Any]]:
    """Return the CP-SAT model and the variables to read. The schedule at hand is the hint.

    These are the starts and, where requests may be left out, then their presences.
    """
    _check_sizes(prog.data)
    built = _Model(prog, budget)
    built.limit_kv()
    built.separate_ends()
    built.order_twins()
    built.add_limits()
    built.separate_phases()

    model, warm = built.model, zip(prog.warm, prog.warm <= prog.last, strict=True)
    # A request that is left out has no start to hint at.
    for i, (value, in_window) in enumerate(warm):
        if in_window:
            model.add_hint(built.start[i], int(value))
        if prog.on_time:
            model.add_hint(built.present[i], bool(in_window))

    if prog.on_time:
        model.minimize(-sum(built.present))
        return model, built.start + built.present

    model.minimize(built.units(prog.goal, prog.known))
    return model, built.start


class _Model:
    """The CP-SAT model, and the variables of each request: its start, and whether it is present."""

    def __init__(self, prog: Program, budget: Budget) -> None:
        from ortools.sat.python import cp_model as cp

        self.data, self.budget, self.model = prog.data, budget, cp.CpModel()
        self.slope = prog.goal.slope
        windows = list(zip(prog.data.arrival.tolist(), prog.last.tolist(), strict=True))
        # No domain may be empty, so one without a start in time has its arrival, and is absent.
        self.start: list[Any] = [
            self.model.new_int_var(first, max(first, last), f"start_{i}")
            for i, (first, last) in enumerate(windows)
        ]
        self.present: list[Any] = []
        if prog.on_time:
            self.present = [self.model.new_bool_var(f"present_{i}") for i in range(len(windows))]
            for present, (first, last) in zip(self.present, windows, strict=True):
                if last < first:
                    self.model.add(present == 0)

    def interval(self, i: int, size: int, name: str, after: int = 0) -> Any:
        """Return an interval of a request that begins some rounds after its start."""
        start, name = self.start[i] + after, f"{name}_{i}"
        # Without presences all requests run.
        if not self.present:
            return self.model.new_fixed_size_interval_var(start, size, name)

        return self.model.new_optional_fixed_size_interval_var(start, size, self.present[i], name)

    def units(self, goal: Goal, known: int) -> Any:
        """Return what is minimized. ``known``: its value for the starts at hand."""
        # slope * (start - arrival) + base, of which all but the start is fixed.
        fixed = (goal.base - goal.slope * self.data.arrival).tolist()
        counted = [
            a * start + b
            for a, start, b in zip(goal.slope.tolist(), self.start, fixed, strict=True)
        ]
        if not goal.largest:
            return sum(counted)

        # Nobody waits less than 0 rounds, and nothing above the known value is of use. Sums need no
        # such range.
        largest = self.model.new_int_var(int(goal.base.max()), known, "largest")
        for value in counted:
            self.model.add(largest >= value)

        return largest

    def both(self, i: int, j: int) -> list[Any]:
        """Return the literals that say that two requests are present."""
        return [self.present[i], self.present[j]] if self.present else []

    def limit_kv(self) -> None:
        """Add the KV capacity: a staircase of intervals per request.

        The whole run holds what is held in its first round, and each later round adds a token.
        """
        data, intervals, heights = self.data, list[Any](), list[int]()
        for i, output in self.budget.through(enumerate(data.output.tolist())):
            intervals += [self.interval(i, output - d, f"kv_{d}", d) for d in range(output)]
            heights += [int(data.first_kv[i])] + [1] * (output - 1)

        self.model.add_cumulative(intervals, heights, int(data.instance.kv_capacity))

    def separate_ends(self) -> None:
        """Separate the completions of two requests whose peaks exceed the capacity together.

        If c_i <= c_j, then c_j - c_i >= min(o_j, p_i + p_j - M) (docs/formulations.md, "Round
        model"). This uses the capacity alone, so it stays valid under further limits. A literal
        says which of the two ends first.
        """
        data, add = self.data, self.model.add
        peak, output = data.instance.peak_tokens.tolist(), data.output.tolist()
        end = [start + o for start, o in zip(self.start, output, strict=True)]
        for i in self.budget.through(range(len(end))):
            for j in range(i + 1, len(end)):
                excess = peak[i] + peak[j] - data.instance.kv_capacity
                # Requests of different blocks never run at the same time.
                if excess > 0 and data.block[i] == data.block[j]:
                    first, both = self.model.new_bool_var(f"first_{i}_{j}"), self.both(i, j)
                    after, before = min(output[j], excess), min(output[i], excess)
                    add(end[j] >= end[i] + after).only_enforce_if(first, *both)
                    add(end[i] >= end[j] + before).only_enforce_if(~first, *both)

    def order_twins(self) -> None:
        """Order the starts of requests of equal prompt, output and weight by arrival, then index.

        No optimum is lost: docs/formulations.md, "Round model". Of sums and of the last completion
        the exchange changes nothing, and of two equal latencies over the same output the larger one
        is smallest in the order of arrivals.
        """
        data = self.data
        if self.present:  # one of the two may be left out
            return

        alike = data.output, data.prompt, self.slope
        order = np.lexsort((np.arange(len(self.start)), data.arrival, *alike))
        # The last keys count first, so equal requests are neighbours in the order.
        for i, j in pairwise(order.tolist()):
            if all(column[i] == column[j] for column in alike):
                self.model.add(self.start[i] <= self.start[j])

    def add_limits(self) -> None:
        """Add the instance's own limits."""
        limits, add = self.data.instance.limits, self.model.add_cumulative
        if not limits.as_dict():
            return

        output, prompt = self.data.output.tolist(), self.data.prompt.tolist()
        run = [self.interval(i, o, "run") for i, o in enumerate(output)]
        prefill = [self.interval(i, 1, "prefill") for i in range(len(output))]
        ones = [1] * len(output)
        if limits.max_running is not None:
            add(run, ones, limits.max_running)
        if limits.max_prefill_tokens is not None:
            add(prefill, prompt, limits.max_prefill_tokens)
        # A request processes 1 token in a round, and its prompt, s - 1 more, in the first.
        if limits.max_batch_tokens is not None:
            add(run + prefill, ones + [s - 1 for s in prompt], limits.max_batch_tokens)

    def separate_phases(self) -> None:
        """Forbid j to start while i decodes: it starts no later than i, or after i has ended.

        A start is a prefill, which without hybrid batching may share no round with a decode.
        """
        data, add = self.data, self.model.add
        # A request with one output token never decodes, and blocks do not overlap in time.
        several = np.flatnonzero(data.output > 1).tolist() if data.hybrid_off else []
        for i in self.budget.through(several):
            for j in np.flatnonzero(data.block == data.block[i]).tolist():
                if i != j:
                    behind, both = self.model.new_bool_var(f"behind_{i}_{j}"), self.both(i, j)
                    end = self.start[i] + int(data.output[i])
                    add(self.start[j] >= end).only_enforce_if(behind, *both)
                    add(self.start[j] <= self.start[i]).only_enforce_if(~behind, *both)
