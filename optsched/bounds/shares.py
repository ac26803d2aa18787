r"""Paths that share the fixed costs of batches: the bound where requests slow each other down.

`optsched.bounds.busy_time` lets every token of a request choose its moment alone. This gives a good
bound when requests wait long and run briefly. When they run at once, their latency is that of a
path: the prefill, then o - 1 steps one after another, each slower the more requests share its
batch. `optsched.bounds.checker.shares` has the notation, the proof, and the value of what this
module finds in floating point: prices, shares and multipliers. The path is that of the prefill
which produces the first token, and of the batches of later tokens. These follow it even where the
request loses its KV in between.

*Multipliers used* rise from step to step where few are in the system. Where many are, prices are
so high that a rise a little wrong costs more than it gains. Between the two both are tried.

*Prices and shares used.* Any are valid. They start from an online schedule: p2 and p3 are in
proportion to N^1.5, with N the number of requests in the system. mu falls evenly with age,
nearly to 0 at the completion: best in a steady stream of equal requests, where steps must cost as
much early as late, with the wait for them. Where N is large, prices are those of
`optsched.bounds.busy_time`, of requests whose shares of fixed costs are such that all work fits
into the time in which the machine is busy. An ascent improves all three. Where the best paths use
more machine time than there is, under the charges of p2 or of p3, that price rises. A request's
share rises where it takes more steps than those with whom it shares. It is as if the steps of a
request had to be at most those of the machine, on average over its best paths.

*What no prices mend.* Each request, and each single cell of its time, is priced by itself. So the
best paths are mixtures: a request hurries now while prefills of others come later, or the reverse,
and for half of the requests each. In a steady stream of equal requests whose steps take a share
delta of the machine, and fixed costs little, this leaves about (1 + delta) / 2 of the latency.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import CHARGES, Bound, BoundTask, Proof, only_by_name
from optsched.bounds.batch import PROVED_FOR, part_of, work_tel
from optsched.bounds.busy_time import Floats, Tokens, cell_at, prices_of, tokens_of
from optsched.bounds.checker.parts import Rejected, Unlimited
from optsched.bounds.checker.shares import check_shares
from optsched.bounds.leaves import seconds_of, shares_leaf
from optsched.bounds.shares_kernel import (
    NO_USE,
    Grid,
    Shared,
    Use,
    costs_of_paths,
    improve_shares,
    new_window,
    scale_to_one,
)
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget, work_time
from optsched.problem.instance import Instance

_FIRST_LEVELS = np.array([0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0])
_APART = [0.004, 0.01, 0.02, 0.04, 0.07, 0.11, 0.17, 0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 3]
# Multipliers tried, of the best ones for each request so far, with the digits of certificates.
_LEVELS: Floats = np.exp([0.0, *_APART, *(-one for one in _APART)]).round(3)
# Where few and where many are in the system: the part of the first prices that is p3, the cells in
# the geometric mean of a request's latency and its time alone, first steps of the logarithms of
# prices and of shares, and after how many they are half as long.
_WITH_FEW, _WITH_MANY = (0.7, 30, 0.4, 0.25, 8), (0.5, 12, 0.03, 0.4, 20)
# Mean numbers of requests in the system up to which multipliers rise, beyond which they do not and
# first prices are those of a preemptive schedule, and beyond which the bound is not tried.
_FEW_IN_SYSTEM, _MANY_IN_SYSTEM, _MOST_IN_SYSTEM = 20.0, 45.0, 100.0
# About the most shares, of all requests together, and cells: beyond them cells are longer.
_MOST_SHARES, _MOST_CELLS = 20_000_000, 2_000_000
# Part of the earlier gradients in their means. The long one is for squares and for shares.
_KEPT, _KEPT_LONG = 0.6, 0.9
# What is added to the size of a cell's gradients, so that small ones do not become large steps.
_SMALL = 0.1
# The lowest price where requests are in the system, per own work over the fixed cost of a step.
_FLOOR = 0.02
# What is added to a share that falls evenly, of its first value, and how fast that fades.
_TAIL, _FADES = 0.1, 3.0
# Steps without a better value after which the ascent goes back, and after which it ends.
_PATIENCE, _STALE = 5, 25
# What the next step and the checker take, in steps.
_LEFT = 2.7


class Start(NamedTuple):
    """First prices p2 and p3 on cells of so many seconds, and shares.

    ``cell`` is that of each arrival. Prices do not fall below ``floor``, and ``steps`` are the
    first steps of the logarithms of prices, and of shares, and after how many they are half as
    long.
    """

    width: float
    price: Floats
    shared: Shared
    cell: NDArray[np.int64]
    floor: Floats
    steps: Sequence[float]


def completions_of(task: BoundTask, instance: Instance, chain: Floats) -> Floats:
    """Return when requests may end, from the first arrival: as the caller says, or alone."""
    cost = task.cost_model
    assert isinstance(cost, BatchCost)  # that of a problem in seconds
    found = None if task.completions is None else task.completions(instance, cost)
    return np.asarray(instance.release + chain if found is None else found, dtype=np.float64)


def in_system(arrival: Floats, finish: Floats, width: float, cells: int) -> NDArray[np.int64]:
    """Return the number of requests in the system in the middle of each cell."""
    moments = (np.arange(cells) + 0.5) * width
    arrived, finished = (np.searchsorted(np.sort(t), moments, "right") for t in (arrival, finish))
    return arrived - finished


def value_at(
    tokens: Tokens,
    width: float,
    price: Floats,
    levels: Floats,
    shared: Shared,
    use: Use = NO_USE,
    centre: Floats | None = None,
    rises: bool = False,
) -> float:
    """Return the bound on total latency that prices prove, but for rounding.

    `levels`: which multipliers are tried for each request. They are those of `centre`, which is
    changed (`costs_of_paths`), times these; or without it those that suit a steady price of these
    times the mean after the arrival. What the best paths use is added to `use`. `rises` is that of
    a `Grid`.
    """
    centre = np.zeros((0, 2)) if centre is None else centre
    grid, chain = Grid(width, price, np.sqrt(price), shared, rises), tokens.chain
    total = costs_of_paths(tokens, chain, grid, new_window(), levels, centre, use)
    # Requests are paid at most the integral of both prices, so this comes off their costs.
    return total - float(price.sum() + shared.price.sum()) * width


def in_batches(tokens: Tokens, busy_s: float) -> Tokens:
    """Return tokens that share fixed costs in batches of such a size that all fits into a time.

    ``busy_s`` is that time, in seconds, and ``size`` how many requests have a batch together. Only
    `Tokens.prefill_paid` and `Tokens.paid` change.
    """
    steps = tokens.steps
    own = tokens.prefill + steps * (tokens.work + tokens.work_slope * (steps - 1) / 2)
    fixed = float((steps * tokens.decode + tokens.prefill_fixed).sum())
    # Fixed costs have the time that own work leaves. An estimated time may leave none, so they get
    # a thousandth of it at least.
    size = max(1.0, fixed / max(0.995 * busy_s - float(own.sum()), 1e-3 * busy_s))

    # The shares that `tokens` has are proved for any batch, so no token pays less than those.
    return tokens._replace(
        prefill_paid=np.maximum(tokens.prefill_paid, tokens.prefill + tokens.prefill_fixed / size),
        paid=np.maximum(tokens.paid, tokens.work + tokens.decode / size),
    )


def start_from(tokens: Tokens, finish: Floats) -> Start:
    """Return prices and shares from completions (module's text, Prices and shares used).

    ``finish`` has the completion of each request, from the first arrival on.
    """
    arrival, alone = tokens.arrival, float(tokens.chain.mean())
    latency = finish - arrival
    # Whether many are in the system; further below ``many`` is another thing. The sum of latencies
    # over the whole time is the mean number in the system (Little's law).
    many = float(latency.sum()) > _MANY_IN_SYSTEM * float(finish.max())
    # The part of the prices that is p3, and how many cells a latency has; for the rest see `Start`.
    part, per_latency, *steps = _WITH_MANY if many else _WITH_FEW
    width = np.sqrt(alone * max(alone, float(latency.mean()))) / per_latency
    # A request has shares over twice its latency (below), which gives their number.
    width = max(width, 2 * float(latency.sum()) / _MOST_SHARES, float(finish.max()) / _MOST_CELLS)
    # Up to the cell of the last completion, and one more.
    cells = int(finish.max() / width) + 2
    number = in_system(arrival, finish, width, cells)
    # First prices are lower where steps have little own work beside their fixed cost. ``whole`` is
    # p2 + p3, of which p3 is the given part.
    steady = min(float(tokens.work.mean()) / max(tokens.decode, 1e-12), 1.0)
    whole: Floats = np.asarray(1.2 * steady * number**1.5 / (1 - part), dtype=np.float64)

    # Where many are in the system first prices are those of a preemptive schedule (module's text).
    if many:
        busy_s = float((number > 0).sum() * width)
        dual, apart = prices_of(in_batches(tokens, busy_s), cells)
        # Their cells last ``apart`` and not ``width``: means over the cells here come from the
        # integral of these prices up to each edge.
        upto = np.interp(
            np.arange(cells + 1) * width,
            np.arange(len(dual) + 1) * apart,
            np.concatenate([[0.0], np.cumsum(dual) * apart]),
        )
        whole = np.diff(upto) / width

    cell = np.array([cell_at(at, width) for at in arrival], dtype=np.int64)
    inside = np.maximum(1, (finish / width).astype(np.int64) - cell + 1)
    # ``inside`` is by request in how many cells it is in the system, and ``many``, from here on an
    # array, in how many it has shares: paths may end after the completions that are assumed, so
    # shares go on for as long again.
    many = np.clip(2 * inside, 1, np.maximum(1, cells - cell))
    # `Shared.begin`, and for each share its place from the request's arrival on, in cells.
    begin = np.concatenate([[0], np.cumsum(many)])
    place = np.arange(begin[-1]) - np.repeat(begin[:-1], many)
    age = place / np.repeat(inside, many)
    share = np.maximum(0.0, 1 - age) + _TAIL * np.exp(-_FADES * age)
    shared = Shared(part * whole, begin, share)
    scale_to_one(shared, cell, cells)
    floor = np.where(number > 0, _FLOOR * steady, 0.0)
    np.maximum(shared.price, floor, out=shared.price)

    return Start(float(width), np.maximum((1 - part) * whole, floor), shared, cell, floor, steps)


def shares(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency, in seconds.

    Without time, and where very many requests are in the system, it is that of work. In the second
    case `busy-time` is better.
    """
    task = task.part(np.argsort(task.instance.release_times, kind="stable"))
    instance, tokens = task.instance, tokens_of(task.instance, task.batch_cost, task.charged)
    finish = completions_of(task, instance, tokens.chain)
    latency = finish - tokens.arrival
    best, part = work_tel(task, budget), part_of(task)

    if budget.limit_s > 0 and latency.sum() <= _MOST_IN_SYSTEM * finish.max():
        few = latency.sum() <= _FEW_IN_SYSTEM * finish.max()
        many = latency.sum() > _MANY_IN_SYSTEM * finish.max()
        # Whether multipliers rise (module's text). Where both are tried, the first has half of the
        # time, and the last all that is left.
        forms = [True] if few else [False] if many else [True, False]
        for rises, share in zip(forms, (1 / len(forms), 1.0), strict=False):
            leaf = ascend(tokens, start_from(tokens, finish), budget.part(share), rises)
            with suppress(Rejected, ArithmeticError):  # as too large
                value = seconds_of(check_shares(part, leaf, "tel", Unlimited()))
                best = max(best, Proof(value, tree=leaf), key=lambda one: one.value)

    return best


def ascend(tokens: Tokens, start: Start, budget: Budget, rises: bool = False) -> dict[str, Any]:
    """Return the leaf of the best value that an ascent on prices and shares finds.

    `rises` is that of a `Grid`. Gradients are averaged and normed, as in Adam (Kingma and Ba 2015):
    that of a price is the share of its cell that the best paths use, less 1. Without a better value
    it goes back, with shorter steps. The arrays of ``start`` change.
    """
    # At the end: the steps of the logarithms, and after how many they are half as long.
    width, price, shared, cell, floor, (price_step, share_step, half) = start
    use = Use._make(np.zeros(k) for k in (len(price), len(price), len(shared.share)))
    centre = np.zeros((len(cell), 2))
    # All of these change in place, and ``best`` has copies in the same order: 0 p2, 1 p3, 2 shares,
    # 3 multipliers.
    state = (price, shared.price, shared.share, centre, *use)
    # Means of gradients and of their squares, each with a row for p2 and one for p3, and of the
    # fixed costs by share.
    mean, square, fixed = *np.zeros((2, 2, len(price))), np.zeros(len(shared.share))
    # The seconds of the last step, steps since the best value, all steps, and the best value.
    spent, stale, step, reached = 0.0, 0, 0, -np.inf

    # One step is always taken, and another one only if it and the checker fit into the time.
    while stale < _STALE and (step == 0 or budget.left_s > _LEFT * spent):
        before, tried = work_time(), centre.copy()
        for one in use:
            one[:] = 0.0

        levels = _LEVELS if step > 0 else _FIRST_LEVELS
        value = value_at(tokens, width, price, levels, shared, use, centre, rises)
        stale += 1

        if value > reached:
            reached, stale, best = value, 0, [one.copy() for one in state]
            # The value is that of `_LEVELS` around the multipliers tried. The first step tries
            # other levels, but level 1 of its best multipliers, which is in `_LEVELS`, gives it.
            multipliers = tried if step > 0 else best[3]
        elif stale % _PATIENCE == 0:
            # Go back to the best, with what its paths used, for a shorter step from there.
            for now, one in zip(state, best, strict=True):
                now[:] = one

            price_step, share_step, mean[:] = price_step / 2, share_step * 0.7, 0.0

        step += 1
        slower = 1 / (1 + step / half)
        # Both means begin at 0, so each is divided by the weights that it has had so far.
        for k, (p, used) in enumerate(((price, use.machine), (shared.price, use.shared))):
            mean[k] = _KEPT * mean[k] + (1 - _KEPT) * (used - 1)
            square[k] = _KEPT_LONG * square[k] + (1 - _KEPT_LONG) * (used - 1) ** 2
            size = np.sqrt(square[k] / (1 - _KEPT_LONG**step)) + _SMALL
            rise = mean[k] / (1 - _KEPT**step) / size
            p[:] = np.maximum(p * np.exp(price_step * slower * rise), floor)

        fixed = _KEPT_LONG * fixed + (1 - _KEPT_LONG) * use.fixed
        improve_shares(shared, fixed, cell, len(price), share_step * np.sqrt(slower))
        scale_to_one(shared, cell, len(price))
        spent = work_time() - before

    shared = Shared(best[1], shared.begin, best[2])
    return shares_leaf(width, best[0], _LEVELS, shared, multipliers, cell, rises)


SHARES = Bound(
    "shares",
    "prices of machine time along paths that share fixed costs; best below saturation",
    "second",
    ("tel",),
    shares,
    PROVED_FOR | CHARGES,
    searches=True,
    suits=only_by_name,
    certifies=True,
)
