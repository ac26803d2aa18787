"""A tabulated cost model from the grids of a profile, with its minorants and a linear model.

The minorants are linear programs: coefficients >= 0 that are at most the table at every point of a
sample, and near it where batches are as serving makes them. One is near where they decode, another
where they prefill. `optsched.costs.table` says why no point between those of the sample can make a
bound wrong.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import COEFFICIENTS
from optsched.costs.profiles.tables import columns_of
from optsched.costs.table import CostTable, Floats, Grid
from optsched.problem.errors import InputError

LONG_KV, FEW_DECODES, SHORT_CHUNK = 4096, 8, 256
"""The minorants are near the table where requests hold at most so many KV tokens, and where batches
decode at least so many requests or prefill at least so many tokens."""
# Maximum number of values of the axis of tokens in the sample.
_PLACES = 64


def tabulate(dense: Grid, request: Grid, attention: Grid, skew: Grid) -> tuple[CostTable, Floats]:
    """Return the table of three grids with its minorants, and a linear model that is near it.

    They give milliseconds per layer: `dense` by tokens, `request` by requests of a batch, and
    `attention` by tokens and KV of prefills, and number and KV of decodes.
    """
    dense, request, attention, skew = map(_rounded, (dense, request, attention, skew))
    points = _sample(dense, request, attention)
    chunk, cached, n, kv, requests = points.T
    ms = np.interp(n + chunk, dense.axes["tokens"], dense.values)
    ms += np.interp(requests, request.axes["requests"], request.values)
    ms += interpolated(attention, points[:, :4])

    # A coefficient that `columns_of` does not know stays 0. Attention knows the tokens of all
    # prefills as those of one, and `requests - n` is how many prefills there are.
    terms = columns_of(chunk, cached, n, kv) | {"prefill_request": requests - n}
    names = [name for name in COEFFICIENTS if name in terms]
    relative = np.stack([terms[name] for name in names], axis=1) / ms[:, None]
    linear = np.zeros(len(COEFFICIENTS))
    linear[[COEFFICIENTS.index(name) for name in names]] = non_negative(relative, np.ones(len(ms)))

    # As serving makes them: some decodes or a long chunk, over KV that is not very long.
    short = (cached <= LONG_KV) & (kv <= LONG_KV)
    decodes = short & (chunk == 0) & (n >= FEW_DECODES)
    prefills = short & (chunk >= SHORT_CHUNK)
    # A batch takes a little time under every minorant, as `BatchCost` expects of a model: `floor`
    # is the minimum of a coefficient, by column.
    floor = {names.index("base"): 1e-6 * ms.min()}
    minorants = [_text(names, minorant(relative, near, floor)) for near in (decodes, prefills)]

    return CostTable((dense, request, attention), minorants, skew), linear


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimizes ``|matrix x - target|``. Columns are scaled first."""
    from scipy.optimize import nnls  # loaded only to fit

    scale = np.abs(matrix).max(axis=0, initial=0)
    scale[scale == 0] = 1
    return np.asarray(nnls(matrix / scale, target)[0] / scale)


def minorant(relative: Floats, near: NDArray[np.bool_], floors: Mapping[int, float]) -> Floats:
    """Return coefficients x >= 0 with ``relative @ x <= 1``, as large in the mean as can be.

    `relative` (shape (rows, columns)) is what multiplies coefficients, over the row's time. The
    mean is over the rows `near`, beside which all rows together count a thousandth. `floors`: the
    minimum of some coefficients, by column.
    """
    from scipy.optimize import linprog

    weights = near / max(near.sum(), 1) + 1e-3 / len(near)
    # Columns differ by many powers of ten, so the program has x times `scale` as its variables.
    scale = relative.max(axis=0)
    scale[scale == 0] = 1
    rows = relative / scale
    bounds = [(floors.get(k, 0.0) * size, None) for k, size in enumerate(scale.tolist())]
    solution = linprog(-(weights @ rows), A_ub=rows, b_ub=np.ones(len(rows)), bounds=bounds)
    if not solution.success:
        reason = solution.message
        raise InputError(f"minorant: found no linear model ({reason}); expected times > 0")

    return np.asarray(solution.x / scale)


def interpolated(grid: Grid, points: Floats) -> Floats:
    """Return the values of a grid at some points, as `batch_time` reads them within its range."""
    from scipy.interpolate import RegularGridInterpolator

    axes = list(grid.axes.values())
    inside = np.clip(points, [axis[0] for axis in axes], [axis[-1] for axis in axes])
    return np.asarray(RegularGridInterpolator(axes, grid.values)(inside))


def left_out(grid: Grid) -> tuple[Floats, Floats]:
    """Return inner values of a grid, and what their two neighbours on an axis give for them."""
    values, predictions = [], []
    for k, axis in enumerate(grid.axes.values()):
        lines = np.moveaxis(grid.values, k, -1)
        # How far each inner place of the axis is on the way between the places beside it.
        share = (axis[1:-1] - axis[:-2]) / (axis[2:] - axis[:-2])
        values.append(lines[..., 1:-1].ravel())
        predictions.append((lines[..., :-2] * (1 - share) + lines[..., 2:] * share).ravel())

    measured, predicted = np.concatenate(values), np.concatenate(predictions)
    return measured[measured > 0], predicted[measured > 0]  # no relative error of an empty batch


def _sample(dense: Grid, request: Grid, attention: Grid) -> Floats:
    """Return batches: prefill tokens and KV, decodes and their KV, and the number of requests.

    They are those of attention's grid. Prefills alone and decodes alone have in addition the sizes
    of `dense`, as far as attention goes. Each batch comes with one prefill, and with many.
    """
    chunks, cached, decodes, kv = attention.axes.values()
    tokens = dense.axes["tokens"]  # of which a few are taken, `_PLACES` at most
    tokens = tokens[np.unique(np.linspace(0, len(tokens) - 1, _PLACES).round().astype(int))]
    batches = set(product(chunks, cached, decodes, kv))
    batches |= set(product(tokens[tokens <= chunks[-1]], cached, [0.0], kv[:1]))
    batches |= set(product([0.0], cached[:1], tokens[tokens <= decodes[-1]], kv))
    points = np.array([b for b in sorted(batches) if b[0] + b[2] > 0])  # not the empty batch

    # The KV of a phase that a batch lacks does not count, so many of these are the same.
    points[points[:, 0] == 0, 1] = 0
    points[points[:, 2] == 0, 3] = 0
    points = np.unique(points, axis=0)

    # A prefill has one token at least, and the grid of requests ends somewhere.
    chunk, n = points[:, 0], points[:, 2]
    one_prefill = n + (chunk > 0)
    many_prefills = n + np.minimum(chunk, np.maximum(1, request.axes["requests"][-1] - n))
    return np.concatenate([np.column_stack([points, r]) for r in (one_prefill, many_prefills)])


def _rounded(grid: Grid) -> Grid:
    """Return a grid with values of six digits, so that files are short."""
    return Grid(grid.axes, np.array([float(f"{value:.6g}") for value in grid.values.ravel()]))


def _text(names: Sequence[str], values: Floats) -> dict[str, str]:
    """Return the decimal text of coefficients, rounded down, without those that are 0."""
    # Six digits change a number by 5e-6 of it at most, so what is printed is no larger than it.
    smaller = zip(names, values * (1 - 1e-5), strict=True)
    return {name: f"{value:.6g}" for name, value in smaller if value > 0}
