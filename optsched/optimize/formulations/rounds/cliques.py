"""The integer program of the round model with lifted clique rows.

P_i is request i's KV in its last round, and c_i is its completion. b_j = P_j - o_j is one token
less than request j holds in its first round. Let P'_i = min(P_i, M - max_j b_j) and
w_i = 2 P'_i - M.

*Windows of large requests are disjoint.* Let c_i <= c_j. Request j runs in the last round of i if
c_j - c_i < o_j. It then holds P_j - (c_j - c_i), so P_i + P_j - (c_j - c_i) <= M. Hence

    c_j - c_i >= min(o_j, P_i + P_j - M) >= P'_i + P'_j - M = (w_i + w_j) / 2,

The second inequality holds since P'_i + P'_j - M <= M - b_j + P_j - M = o_j and P' <= P. So the
windows [c_i - w_i / 2, c_i + w_i / 2) of requests with w > 0 are disjoint.

*Rows.* All w have the parity of M. So the windows consist of whole cells of one round, which are
shifted by half a round if M is odd. In every cell, the starts whose windows contain it sum to at
most 1. The rows hold for every feasible choice of starts, so they keep the optimum.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.rounds.hindsight import SWITCHES, solve_by_highs
from optsched.optimize.formulations.rounds.integer_program import ENTRY_BYTES, Program
from optsched.optimize.solvers.base import LinearModel, SolveOptions
from optsched.problem.memory import check_size


def widths(prog: Program) -> NDArray[np.int64]:
    """Return max(0, w_i) of the module's text, shape (n,)."""
    data = prog.data
    before_first = data.first_kv - 1
    peak = before_first + data.output
    capacity = data.instance.kv_capacity
    return np.maximum(0, 2 * np.minimum(peak, capacity - before_first.max()) - capacity)


def with_cliques(prog: Program, model: LinearModel) -> LinearModel:
    """Return the integer program with a row for every cell that two windows can share.

    Parameters
    ----------
    prog : Program
    model : LinearModel
        The integer program.

    Returns
    -------
    LinearModel

    Raises
    ------
    TooLargeError
        These rows have too many nonzeros (`check_size`).
    """
    data, width = prog.data, widths(prog)
    parity = data.instance.kv_capacity % 2
    counts = prog.last - data.arrival + 1
    entries = int((width * counts).sum())
    check_size(entries, ENTRY_BYTES, "nonzeros in the clique rows", "highs has no such rows")
    before = prog.columns_before
    columns, cells = [], []
    for i in np.flatnonzero(width):
        starts = np.arange(data.arrival[i], prog.last[i] + 1)
        first = (2 * (starts + data.output[i]) - width[i] - parity) // 2
        cells.append((first[:, None] + np.arange(width[i])).reshape(-1))
        columns.append(np.repeat(before[i] + starts - data.arrival[i], width[i]))
    if not cells:
        return model
    cell, column = np.concatenate(cells), np.concatenate(columns)
    cell -= cell.min()
    # A cell in the windows of one request only repeats the request's row "once".
    request = np.searchsorted(before, column, side="right") - 1
    most, least = np.full(cell.max() + 1, -1), np.full(cell.max() + 1, data.instance.n)
    np.maximum.at(most, cell, request)
    np.minimum.at(least, cell, request)
    shared = most > least
    row = np.cumsum(shared) - 1 + len(model.row_lower)
    keep = shared[cell]
    cell, column = cell[keep], column[keep]

    old = np.repeat(np.arange(model.columns), np.diff(model.start))
    of_column = np.concatenate([old, column])
    order = np.argsort(of_column, kind="stable")
    start = np.zeros(model.columns + 1, dtype=model.start.dtype)
    np.cumsum(np.bincount(of_column, minlength=model.columns), out=start[1:])
    added = int(shared.sum())
    return replace(
        model,
        start=start,
        index=np.concatenate([model.index, row[cell].astype(model.index.dtype)])[order],
        value=np.concatenate([model.value, np.ones(len(cell))])[order],
        row_lower=np.concatenate([model.row_lower, np.full(added, -np.inf)]),
        row_upper=np.concatenate([model.row_upper, np.ones(added)]),
    )


def solve_with_cliques(task: Task, options: SolveOptions) -> Answer:
    """Solve the integer program with clique rows by HiGHS.

    Raises
    ------
    UsageError, InfeasibleError
        See `solve_by_highs` and `with_cliques`.
    """
    return solve_by_highs(task, options, with_cliques)


METHODS = {
    "hindsight": {
        "highs-cliques": Method(
            "time-indexed integer program with lifted clique rows by HiGHS",
            solve_with_cliques,
            ("tel",),
            SWITCHES,
        )
    }
}
