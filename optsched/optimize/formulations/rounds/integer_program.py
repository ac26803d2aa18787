"""The hindsight-optimal integer program of the round model, as arrays.

docs/formulations.md, "Round model", writes it out: x_it = 1 if request i starts in round t, with
rows "once" by request and "memory" by round, for t from a_i to the last start that an optimal
schedule can need (`start_windows`). An instance's own limits add, for every round t,

- running: at most R_max requests run in t;
- batch: the requests whose first round is t count s_i each, other running requests count 1 each,
  and the sum is at most C;
- prefill: the requests whose first round is t count s_i each, and the sum is at most P;
- phase (hybrid batching off): a column y_t in [0, 1] with x_{i,t-1} <= y_t for every i and
  sum_{k = t - o_i}^{t-2} x_ik <= 1 - y_t for every i: a prefill in t rules out decodes in t.

For the most requests within their SLOs, starts in time are columns, "once" is at most 1, and the
sum of all x_it is maximized (`optsched.optimize.formulations.rounds.on_time`). Rows that no choice
of starts can violate are left out.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.timeline import Floats, Ints
from optsched.optimize.formulations.base import Answer, Task
from optsched.optimize.formulations.rounds import horizon, on_time
from optsched.optimize.formulations.rounds.goals import GOALS, Goal, goal_of, in_values
from optsched.optimize.formulations.rounds.horizon import RoundData
from optsched.optimize.solvers.base import LinearModel, RawOutcome, SolveOptions, Status
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import SolverError
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits
from optsched.problem.memory import check_size, check_tokens
from optsched.problem.schedule import Schedule

ENTRY_BYTES = 50
"""The bytes of a nonzero: 12 here, 16 while it is made, and the rest in HiGHS."""


@dataclass(frozen=True, eq=False)
class Program:
    """What every method starts from, in the model's time.

    `last` (shape (n,)) is the last start that a schedule of min value can need, or with `on_time`
    that in time. Starts `warm` of a feasible schedule are within it unless `on_time`.
    """

    data: RoundData
    last: Ints
    warm: Ints
    goal: Goal
    on_time: bool = False

    @property
    def known(self) -> int:
        """The value of `warm` in the models, which minimize minus the number of those in time."""
        if self.on_time:
            return -int((self.warm <= self.last).sum())

        return self.goal.units(self.warm - self.data.arrival)

    def options_left(self, options: SolveOptions, budget: Budget) -> SolveOptions:
        """Return options with the time that is left, whose progress is in the objective's unit."""
        remaining, n = options.after(budget.spent_s), self.data.instance.n
        # + 0.0 turns -0.0 into 0.
        in_values = (lambda count: -count / n + 0.0) if self.on_time else self.goal.value
        return remaining.reporting(in_values)

    @property
    def columns_before(self) -> Ints:
        """The number of start columns before each request's first one, shape (n + 1,)."""
        return np.concatenate([[0], np.cumsum(self.last - self.data.arrival + 1)])


def program(
    instance: Instance,
    goal: Goal | None = None,
    *,
    warm_start: Schedule | None = None,
    windows: bool = True,
) -> Program:
    """Return the data of the integer program, with windows from the schedule's value if wanted.

    No ``goal`` means total latency. Without ``windows`` a last start comes from the deadline of the
    request's block alone. ``warm_start`` is used if it is better than the serial schedule.
    """
    data = horizon.round_data(instance)
    goal = GOALS["tel"](instance) if goal is None else goal
    candidates = [horizon.serial_starts(data)]

    # A given schedule is of use if it keeps the blocks' deadlines once its idle rounds are cut.
    if warm_start is not None and warm_start.starts is not None:
        given_starts = horizon.without_idle(data, warm_start.starts - data.shift)
        if (given_starts + data.output <= data.deadline).all():
            candidates.append(given_starts)

    warm = min(candidates, key=lambda starts: goal.units(starts - data.arrival))
    # `start_windows` argues by total latency, so its bound U_i is for goals that this decides.
    tel = data.tel(warm) if windows and goal.equal else None
    last = horizon.start_windows(data, tel)
    # The same argument for other goals: nobody waits longer than the value of `warm` allows.
    if windows and not goal.equal:
        waits = goal.waits(goal.units(warm - data.arrival))
        last = np.maximum(np.minimum(last, data.arrival + waits), data.arrival)

    return Program(data, last, _order_twins(data, warm, goal), goal)


def program_of(task: Task, warm_start: Schedule | None = None) -> Program:
    """Return the data of the integer program of a task: its objective, or the most in time.

    For the most in time `Program.goal` does not count, and `Program.warm` may start some late.
    """
    if task.names[:1] != ("slo_attainment",):
        return program(task.instance, goal_of(task), warm_start=warm_start)

    instance = task.instance
    data = horizon.round_data(instance)
    # None: no limits are given for all requests, so the instance's own count.
    last = on_time.last_on_time(data, all_limits(instance, None))
    # Starts to begin with: those due first come first, the serial schedule, or the given one.
    by_last = np.lexsort((data.arrival, last))
    plain = program(instance, windows=False)
    candidates = [horizon.place(data, by_last), plain.warm]
    if warm_start is not None and warm_start.starts is not None:
        candidates.append(warm_start.starts - data.shift)

    best = max(candidates, key=lambda starts: int((starts <= last).sum()))
    return Program(data, last, best, plain.goal, on_time=True)


def _order_twins(data: RoundData, starts: Ints, goal: Goal) -> Ints:
    """Exchange the starts of equal requests so that they increase with arrival and index.

    CP-SAT orders equal requests like this (`order_twins` there), so these starts are feasible in
    its model, too. Requests are equal if output, prompt and the weight in the goal are.
    """
    alike = data.output, data.prompt, goal.slope
    # The last keys count first: equal requests stand together, in both orders at the same places.
    by_arrival = np.lexsort((np.arange(len(starts)), data.arrival, *alike))
    by_start = np.lexsort((starts, *alike))
    ordered = np.empty_like(starts)
    ordered[by_arrival] = starts[by_start]

    return ordered


def linear_model(prog: Program, budget: Budget = NO_LIMIT) -> LinearModel:
    """Return the integer program as arrays.

    Columns are x_it by request and start, then y_t by round if hybrid batching is off. Rows are
    "once" by request, then by round the families that are needed. Entries are stored by column:
    column j has those from ``start[j]`` to ``start[j + 1]`` of ``index`` (the rows) and ``value``.
    For the most in time each start column costs -1. Columns y_t may be fractions: a start is whole,
    and all that they do is to exclude decodes beside it.
    """
    data, last = prog.data, prog.last
    n = data.instance.n
    what = f"nonzeros in the integer program of {n} requests"
    check_size(entries_at_most(data, last), ENTRY_BYTES, what, "placement has no such limit")
    check_tokens(int(data.instance.peak_tokens.max()), "highs")
    families = _Families(prog)
    before = prog.columns_before
    columns = int(before[-1])
    lengths = np.repeat(families.entries_per_start, last - data.arrival + 1)
    # Rows that are left out make columns shorter. The exact number is counted while filling.
    index = np.empty(int(lengths.sum()), dtype=np.int32)
    value = np.empty(len(index), dtype=np.float64)
    cost = np.empty(columns, dtype=np.float64)
    counts = np.empty(columns, dtype=np.int64)
    filled = 0

    for i in budget.through(range(n)):
        starts = np.arange(data.arrival[i], last[i] + 1)
        # It has no start in time, so no column.
        if not len(starts):
            continue

        # What each start counts in the objective (`Goal`), and its entries; row -1: none is needed.
        counted = prog.goal.slope[i] * (starts - data.arrival[i]) + prog.goal.base[i]
        cost[before[i] : before[i + 1]] = -1 if prog.on_time else counted
        rows, values = families.entries(i, starts)
        is_needed = rows >= 0
        size = int(np.count_nonzero(is_needed))
        index[filled : filled + size] = rows[is_needed]
        value[filled : filled + size] = values[is_needed]
        counts[before[i] : before[i + 1]] = is_needed.sum(axis=1)
        filled += size

    phase_index, phase_value, phase_counts = families.phase_columns()
    start = np.zeros(columns + len(phase_counts) + 1, dtype=np.int32)
    np.cumsum(np.concatenate([counts, phase_counts]), out=start[1:])
    phases = len(phase_counts)

    return LinearModel(
        cost=np.concatenate([cost, np.zeros(phases)]),
        lower=np.zeros(columns + phases),
        upper=np.ones(columns + phases),
        integrality=np.repeat(np.array([1, 0], dtype=np.int32), [columns, phases]),
        start=start,
        index=np.concatenate([index[:filled], phase_index]).astype(np.int32, copy=False),
        value=np.concatenate([value[:filled], phase_value]),
        row_lower=families.row_lower,
        row_upper=families.row_upper,
        integral_objective=True,
    )


def entries_at_most(data: RoundData, last: Ints) -> float:
    """Return an upper bound on the nonzeros, given the last starts.

    It is a float, since it may exceed int64.
    """
    # Memory and each limit have an entry for each round of a run; "once" has one for each start.
    families = 1 + len(data.instance.limits.as_dict()) + data.hybrid_off
    starts = (last - data.arrival + 1).astype(np.float64)
    # Column y_t has 2 n entries, and there are end + 1 <= 2 end of them (`phase_columns`).
    phases = 4.0 * data.instance.n * (last + data.output).max() if data.hybrid_off else 0.0
    return float((starts * (data.output * families + 1)).sum()) + phases


class _Families:
    """Numbers the rows that are needed and gives the entries of every request's columns.

    Rows 0..n-1 are "once" by request. ``row_of[family][t]`` is the row of a family in round t, or
    -1 if none is needed. With hybrid batching off, request i has in round t the row of prefills
    ``phase_row + 2 * (i * (end + 1) + t)``, x_{i,t-1} - y_t <= 0, and after it that of decodes.
    ``entries_per_start`` (shape (n,)) counts a column's entries, those without a row included.
    """

    def __init__(self, prog: Program) -> None:
        self.prog = prog
        data = prog.data
        limits = data.instance.limits
        n, end = data.instance.n, int((prog.last + data.output).max())
        self.end = end
        kv, running, tokens, prefill = _largest_use(prog, end)
        # The upper limits of the rows so far, and their number, which begin with "once".
        upper = [np.ones(n)]
        self.row_of: dict[str, NDArray[np.int32]] = {}
        rows = n

        for name, use, limit in (
            ("memory", kv, data.instance.kv_capacity),
            ("running", running, limits.max_running),
            ("batch", tokens, limits.max_batch_tokens),
            ("prefill", prefill, limits.max_prefill_tokens),
        ):
            if limit is None:
                continue

            # Rows for the rounds in which the requests together might use more than the limit.
            count = int((use > limit).sum())
            self.row_of[name] = np.full(end + 1, -1, dtype=np.int32)
            self.row_of[name][use > limit] = np.arange(rows, rows + count, dtype=np.int32)
            upper.append(np.full(count, float(limit)))
            rows += count

        self.phase_row = rows
        if data.hybrid_off:
            # Two rows per request and round 0..end: x - y <= 0, decodes + y <= 1.
            upper.append(np.tile([0.0, 1.0], n * (end + 1)))
            rows += 2 * n * (end + 1)

        self.row_upper = np.concatenate(upper)
        # "once" is an equation, unless requests may be left out. No other row has a lower limit.
        once = np.full(n, 0.0 if prog.on_time else 1.0)
        self.row_lower = np.concatenate([once, np.full(rows - n, -np.inf)])
        # One entry for "once", one a round for families of whole runs, and one for the first round.
        runs = sum(name != "prefill" for name in self.row_of) + data.hybrid_off
        self.entries_per_start = 1 + runs * data.output + ("prefill" in self.row_of)

    def entries(self, i: int, starts: Ints) -> tuple[NDArray[np.int32], Floats]:
        """Return rows (-1: none) and values of request i's columns, shape (starts, entries).

        ``starts`` are consecutive, so that the rows of a family are a sliding window over its
        rounds. Along a line stand the entry of "once", those of each family of `row_of` by round of
        the run, and those of phases.
        """
        data = self.prog.data
        output, prompt = int(data.output[i]), float(data.prompt[i])
        rows = np.empty((len(starts), int(self.entries_per_start[i])), dtype=np.int32)
        values = np.empty(rows.shape, dtype=np.float64)
        rows[:, 0], values[:, 0] = i, 1.0  # "once"
        place = 1
        first = int(starts[0]) + 1

        for name, row_of in self.row_of.items():
            width = 1 if name == "prefill" else output
            # A start k uses rounds k + 1 .. k + width, so that start k + 1 has the next window.
            window = row_of[first : first + len(starts) + width - 1]
            rows[:, place : place + width] = np.lib.stride_tricks.sliding_window_view(window, width)

            # KV grows by a token a round. The first round processes the prompt, later ones 1 token.
            if name == "memory":
                values[:, place : place + width] = data.first_kv[i] + np.arange(width)
            else:
                values[:, place : place + width] = 1.0
                if name != "running":
                    values[:, place] = prompt

            place += width

        if data.hybrid_off:
            # A request and a round have two rows in succession: that of prefills, which the first
            # round of the run takes, and after it that of decodes, which later rounds take.
            rounds = starts[:, None] + np.arange(1, output + 1)
            rows[:, place:] = self.phase_row + 2 * (i * (self.end + 1) + rounds) + 1
            rows[:, place] -= 1
            values[:, place:] = 1.0

        return rows, values

    def phase_columns(self) -> tuple[NDArray[np.int32], Floats, Ints]:
        """Return rows, values and number of entries of the columns y_t, round by round.

        Each y_t stands with -1 in the row of prefills of every request in round t, and with 1 in
        that of its decodes.
        """
        n = self.prog.data.instance.n
        if not self.prog.data.hybrid_off:
            return np.empty(0, np.int32), np.empty(0), np.empty(0, np.int64)

        rounds = np.arange(self.end + 1)
        # By round and request: its row of prefills, behind which that of its decodes follows.
        pairs = self.phase_row + 2 * (np.arange(n) * (self.end + 1) + rounds[:, None])
        rows = np.stack([pairs, pairs + 1], axis=-1).reshape(-1)
        values = np.tile([-1.0, 1.0], len(rows) // 2)

        return rows.astype(np.int32), values, np.full(self.end + 1, 2 * n, dtype=np.int64)


def _largest_use(prog: Program, end: int) -> tuple[Ints, ...]:
    """Return the max that all requests can use in each of the rounds 0..end, to leave rows out.

    Four arrays of shape (end + 1,): KV, running requests, tokens and prefill tokens. Each request
    counts in a round as its start in the window that uses most there.
    """
    data = prog.data
    kv, running, tokens, prefill = np.zeros((4, end + 1), dtype=np.int64)

    for i in range(data.instance.n):
        first, final = int(data.arrival[i]) + 1, int(prog.last[i])
        output = int(data.output[i])
        # Started in any round of its window, by round t it holds t - first + 1 more at most.
        tokens_held = np.minimum(np.arange(1, final + output - first + 2), output)
        rounds = slice(first, final + output + 1)
        kv[rounds] += data.first_kv[i] + tokens_held - 1
        running[rounds] += 1
        tokens[rounds] += 1
        # Its first round is one of first .. final + 1; there it processes its prompt, not 1 token.
        tokens[first : final + 2] += data.prompt[i] - 1
        prefill[first : final + 2] += data.prompt[i]

    return kv, running, tokens, prefill


def start_values(prog: Program, model: LinearModel) -> Floats:
    """Return the values of the columns for `Program.warm`, shape (columns,).

    Requests that it starts after their last start have no column with 1: they are left out.
    """
    values = np.zeros(model.columns)
    before = prog.columns_before
    in_window = prog.warm <= prog.last
    values[(before[:-1] + prog.warm - prog.data.arrival)[in_window]] = 1.0
    # y_t is 1 in the rounds with a prefill, each the one after a start.
    if prog.data.hybrid_off:
        values[before[-1] + prog.warm[in_window] + 1] = 1.0

    return values


def chosen_starts(prog: Program, values: Floats) -> tuple[Ints, Ints]:
    """Return the requests of the start columns that are chosen, in order, and their starts.

    Solvers return binaries as floats near 0 or 1. A request is there as often as it has starts.
    """
    before = prog.columns_before
    chosen = np.flatnonzero(values[: before[-1]] > 0.5)
    request = np.searchsorted(before, chosen, side="right") - 1
    return request, chosen - before[request] + prog.data.arrival[request]


def read_starts(prog: Program, values: Floats) -> Ints:
    """Return the starts that the values of the columns mean."""
    request, begin = chosen_starts(prog, values)
    # At most one start each. Who is left out starts after its last start in time.
    if prog.on_time and (np.diff(request) > 0).all():
        starts = prog.last + 1
        starts[request] = begin
        return starts

    if not np.array_equal(request, np.arange(prog.data.instance.n)):
        raise SolverError("solver: found a request without exactly one start; expected one each")

    return begin


def answer(prog: Program, raw: RawOutcome, starts: Ints | None) -> Answer:
    """Return the answer of a solver's outcome and the starts read from it.

    The objective is that of the schedule, which may be better than the solver's: where some are
    left out, `on_time.with_late` may still serve them in time.
    """
    schedule: Schedule | None = None
    objective, bound = in_values(raw, prog.goal)
    if prog.on_time:
        if (prog.last < prog.data.arrival).all():  # solvers have no answer to an empty model
            raw, starts = replace(raw, status=Status.OPTIMAL, objective=0.0, bound=0.0), prog.warm
        if starts is not None:
            schedule, count = on_time.with_late(prog.data, starts, prog.last)
            # The program minimizes, so its value is minus the requests in time.
            raw = replace(raw, objective=-count)

        objective, bound = on_time.as_shares(raw, prog.data.instance.n)
    elif starts is not None:
        schedule = prog.data.schedule(starts)
        objective = prog.goal.value(prog.goal.units(starts - prog.data.arrival))

    return Answer(raw.status, schedule, objective, bound, raw.native_status, raw.solve_s)
