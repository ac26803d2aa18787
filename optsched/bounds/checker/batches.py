r"""Batches that fit a machine, and the least time that they take by a cost model.

docs/formulations.md, "Charges by batch length", has the notation. A batch has C prefill tokens with
H cached tokens before them, and n decodes of mean KV kv, K = n kv in all. It holds D tokens after.

*What is known of a batch.* D <= K + n (offset + block), since a decode holds one token more in
whole blocks. What the requests hold is at most the capacity M, so K + n (1 + offset) + H + C <= M
and D <= M - H - C. No request has more than L tokens, so kv <= L, and
Q <= C min(H, L) + C (C - 1) / 2. Every prefill takes a seat.

*Time.* A tabulated batch lasts at least the sum of its grids. Each grid is extended to the largest
content that fits, by the rule of the judge beyond its last value, so it is multilinear in every
cell of its nodes. Requests are n, or with prefills any number of n + 1 to the seats: the least
value counts. Uneven decodes are read at longer KV than their mean, so where there is skew a node
gets the least value over longer KV that is reachable beside it; interpolated, this is at most the
grid anywhere on the way, since weights are >= 0. Linear models are grids with a cell per axis,
which begins at 1 token beside that of 0. Sums of squares c^2 and products c m are at most C^2 and
C min(H, L), and at least C and 0, whichever makes the batch dearer for its time.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import TooLarge, expect, expect_known

Floats = NDArray[np.float64]
QUANTITIES = ("prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")
"""The quantities C, H, n and kv of the axes of a box."""
ROUNDING = 1e-12
"""A hundred times the relative error of a sum of floats here."""
# Max nodes of the grids once they have each other's.
_NODES = 300_000


class Batches(NamedTuple):
    """The batches that fit a machine, and the least time that they take.

    ``room`` is M, ``min_extra`` and ``max_extra`` the KV that a decode holds beyond what it had
    cached, ``seats`` and ``tokens`` limits, ``longest`` L, and ``hybrid`` says whether a batch may
    decode and prefill. ``values`` has seconds by the ``axes``
    (C, H, n, kv); ``dense``, ``alone`` and ``beside`` are nodes (2, number) by tokens,
    and by decodes without and with prefills. ``square`` and ``cross`` are seconds per c^2 and c m
    of a linear model, and ``size`` bounds the time of every node.
    """

    room: float
    min_extra: float
    max_extra: float
    seats: float
    tokens: float
    longest: float
    hybrid: bool
    chunk: Floats
    cached: Floats
    decodes: Floats
    kv: Floats
    values: Floats
    dense: Floats
    alone: Floats
    beside: Floats
    square: float
    cross: float
    size: float

    @property
    def axes(self) -> tuple[Floats, ...]:
        """The nodes of C, H, n and kv."""
        return self.chunk, self.cached, self.decodes, self.kv


def batches_of(instance: Any, cost: Any) -> Batches:
    """Return the batches that fit an instance's machine, under a linear or tabulated cost model.

    No request has more tokens than the longest one of the instance.
    """
    expect(instance.time_unit == "second", "instance: found rounds; expected one in seconds")
    expect_known(instance)
    limits, offset = instance.limits, 1 if instance.kv_accounting == "generated" else 0
    room = int(instance.kv_capacity)
    longest = min(int((instance.prompt_tokens + instance.output_tokens).max()), room)
    # Missing limits are as large as the KV allows: a decode holds two tokens of KV or more. C and n
    # are at most the capacity each, so tokens are at most twice that.
    tokens = min(limits.max_batch_tokens or room, 2 * room)
    seats = min(limits.max_running or room, room)
    decodes = max(1, min(seats, tokens, room // (2 + offset)))
    chunk = max(1, min(tokens, limits.max_prefill_tokens or room, room))
    whole_prefills = instance.chunked_prefill is False
    # Each prefill has a token and a seat, and L tokens cached before it at most.
    cached = 0 if whole_prefills else min(room, min(chunk, seats) * longest)
    reach = (chunk, cached, decodes, longest)  # the largest C, H, n and kv
    extra = 1 + offset, offset + int(instance.kv_block_tokens)
    sizes = (room, *extra, seats, tokens, longest)
    limited: Any = (*map(float, sizes), instance.hybrid_batching is not False)
    # ``limited`` has the fields of `Batches` up to `hybrid`, and the times those after it.
    if cost.table is None:
        return Batches(*limited, *_linear_times(cost, reach, longest))

    return Batches(*limited, *_tabulated_times(cost, reach, longest, (room, tokens, seats)))


def least_prefills(batches: Batches) -> Floats:
    """Return at c the least seconds of a batch with c prefill tokens or more, for c up to L.

    It is the sum of the least values of the grids, of the line by tokens and of that by requests,
    each over all contents with as many tokens. The values at a node of C are least at one of the
    other nodes, and between two nodes of C they are at least on the line between their minima.
    Squares and products of a linear model are left out.
    """
    tokens = np.arange(min(batches.chunk[-1], batches.longest) + 1)
    grids = _least_from(batches.chunk, batches.values.min(axis=(1, 2, 3)), tokens)
    dense = _least_from(batches.dense[0], batches.dense[1], tokens)
    return np.asarray(grids + dense + batches.beside[1].min())


def _least_from(axis: Floats, values: Floats, x: Floats) -> Floats:
    """Return the least value of a line from x on, which is that of its last node behind it."""
    after = np.minimum.accumulate(values[::-1])[::-1]
    following = np.minimum(np.searchsorted(axis, x), len(axis) - 1)
    return np.asarray(np.minimum(np.interp(x, axis, values), after[following]))


def _linear_times(cost: Any, reach: tuple[int, ...], longest: int) -> tuple[Any, ...]:
    """Return the axes and times of a linear model, as the fields of `Batches` from `chunk` on.

    Times at nodes are those with the least sum of squares and products. ``reach`` has the largest
    C, H, n and kv, and ``longest`` is L.
    """
    unit = cost.layers / 1000.0
    axes = _axes(reach, longest, [])
    chunk, cached, n, kv = np.meshgrid(*axes, indexing="ij", sparse=True)
    prefill = (cost["prefill_token"] + cost["prefill_square"]) * chunk + cost["prefill_kv"] * cached
    decode = (cost["decode_request"] + cost["decode_kv"] * kv) * n + cost["decode_base"]
    fixed = cost["prefill_request"] + cost["prefill_base"]
    both = cost["token"] * (chunk + n) + cost["base"] + (n > 0) * decode
    values = unit * np.asarray(both + (chunk > 0) * (prefill + fixed))
    # The lines by tokens and by requests, at nodes 0 and 1: these alone cost nothing more.
    zero = np.array([[0.0, 1.0], [0.0, 0.0]])
    square, cross = unit * cost["prefill_square"], unit * cost["prefill_cross"]
    return (*axes, values, zero, zero, zero, square, cross, values.max())


def _tabulated_times(
    cost: Any, reach: tuple[int, ...], longest: int, limits: tuple[int, int, int]
) -> tuple[Any, ...]:
    """Return the axes and times of a table, as the fields of `Batches` from `chunk` on.

    `limits`: the KV capacity M, and the max tokens and requests of a batch. ``reach`` has the
    largest C, H, n and kv, and ``longest`` is L.
    """
    room, tokens, seats = limits
    chunk, _, decodes, _ = reach
    unit = cost.layers / 1000.0
    axes = _axes(reach, longest, [cost.table.skew, *cost.table.grids])
    count = int(np.prod([float(len(axis)) for axis in axes]))
    # Nodes of all grids together multiply, and so does the time of the search over boxes.
    if count > _NODES:
        raise TooLarge(f"found {count} nodes of a cost table; expected at most {_NODES}")

    # A grid over tokens or over requests alone stays a line. All others are added up as one.
    values = np.zeros(tuple(len(axis) for axis in axes))
    lines = {name: (np.array([0.0]), np.array([0.0])) for name in ("tokens", "requests")}
    for grid in cost.table.grids:
        name = next(iter(grid.axes))
        if len(grid.axes) == 1 and name in lines:
            lines[name] = _add_lines(lines[name], (grid.axes[name], grid.values))
            continue

        known = set(grid.axes) <= set(QUANTITIES)
        expect(known, f"cost table: found a grid over {', '.join(grid.axes)}, which nothing proves")
        values += _resample(grid, axes)

    # By number of decodes alone.
    skew = _resample(cost.table.skew, axes).max(axis=(0, 1, 3))
    # Uneven decodes are read at longer KV than their mean (module's text, Time).
    if skew.max() > 0:
        _lower_to_longer(values, axes, np.clip(skew, 0, 1), room)

    # Beside prefills there may be any number of requests from n + 1 on: the least value counts, and
    # what holds from n + 1 requests on stands at n.
    dense = _extend_to(lines["tokens"], min(tokens, chunk + decodes))
    alone = _extend_to(lines["requests"], seats)
    beside = np.array([alone[0] - 1, np.minimum.accumulate(alone[1][::-1])[::-1]])
    size = unit * sum(float(np.abs(part).max()) for part in (values, dense[1], alone[1]))
    seconds = np.array([[1.0], [unit]])  # nodes stay as they are
    lines_s = seconds * dense, seconds * alone, seconds * beside

    # `square` and `cross` are 0: a table has no such costs.
    return (*axes, unit * values, *lines_s, 0.0, 0.0, size)


def _axes(reach: tuple[int, ...], longest: int, grids: list[Any]) -> tuple[Floats, ...]:
    """Return the nodes of all grids up to what is reachable, with 0, 1, L and what is reachable.

    ``reach`` has the largest C, H, n and kv, and ``longest`` is L.
    """
    axes = []
    for name, end in zip(QUANTITIES, reach, strict=True):
        nodes = [0.0, 1.0, float(max(end, 1))]
        for grid in grids:
            nodes += [x for x in grid.axes.get(name, ()) if 1 < x < end]
        # At H = L the bound of products, C min(H, L), has a bend.
        if name == "prefill_kv" and longest < end:
            nodes.append(float(longest))

        axes.append(np.unique(nodes))

    return tuple(axes)


def _line_at(axis: Floats, values: Floats, x: Floats) -> Floats:
    """Return values at x, on the line through the two nodes around it, or through the last two.

    The nodes are ``axis``, along the first dimension of ``values``. What lies beyond the last node
    is rounded down.
    """
    low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
    share = np.maximum(0.0, (x - axis[low]) / (axis[low + 1] - axis[low]))
    share = share.reshape(-1, *(1,) * (values.ndim - 1))
    below, above = values[low], values[low + 1]
    # Rounding may make a value too large where the line goes on, so that much is taken off.
    beyond = np.where(share > 1, ROUNDING * share * (np.abs(below) + np.abs(above)), 0.0)
    return np.asarray((1 - share) * below + share * above - beyond)


def _resample(grid: Any, axes: tuple[Floats, ...]) -> Floats:
    """Return a grid over some of `QUANTITIES` at the nodes of all four, in their order.

    It is constant along the others.
    """
    values, names = grid.values, list(grid.axes)
    for k, name in enumerate(names):
        nodes = axes[QUANTITIES.index(name)]
        moved = _line_at(grid.axes[name], np.moveaxis(values, k, 0), nodes)
        values = np.moveaxis(moved, 0, k)

    order = sorted(range(len(names)), key=lambda k: QUANTITIES.index(names[k]))
    shape = [len(axis) if name in names else 1 for name, axis in zip(QUANTITIES, axes, strict=True)]
    in_order = np.transpose(values, order).reshape(shape)
    return np.broadcast_to(in_order, tuple(len(axis) for axis in axes))


def _lower_to_longer(values: Floats, axes: tuple[Floats, ...], skew: Floats, room: int) -> None:
    """Replace values by their least over longer KV that is reachable beside the decodes' node.

    Between this node and its neighbours, n decodes of skew s are read at M / n + s M at most.
    ``values`` are by the ``axes`` (C, H, n, kv), ``skew`` is by the nodes of n, and M is ``room``.
    """
    decodes, kv = axes[2], axes[3]
    for j in range(len(decodes)):
        first, last = max(j - 1, 0), min(j + 1, len(decodes) - 1)
        # The fewest decodes between the neighbours are read at the longest KV.
        reach = room / max(decodes[first], 1.0) + skew[first : last + 1].max() * room
        end = min(int(np.searchsorted(kv, reach)), len(kv) - 1)
        # A running min from the longest KV that is reachable down.
        for i in range(end - 1, -1, -1):
            values[:, :, j, i] = np.minimum(values[:, :, j, i], values[:, :, j, i + 1])


def _add_lines(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Floats, Floats]:
    """Return the nodes and the values of the sum of two lines, of which the first may be empty."""
    if len(first[0]) == 1:
        return np.asarray(second[0]), np.asarray(second[1])

    nodes = np.union1d(first[0], second[0])
    return nodes, _line_at(*first, nodes) + _line_at(*second, nodes)


def _extend_to(line: tuple[Floats, Floats], end: int) -> Floats:
    """Return the nodes of a line from 0 to an end."""
    axis, _ = line
    nodes = np.unique([0.0, *axis[(axis > 0) & (axis < end)], float(max(end, 1))])
    return np.array([nodes, np.zeros(len(nodes)) if len(axis) == 1 else _line_at(*line, nodes)])
