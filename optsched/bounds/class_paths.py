"""Prices along each request's path through classes of batches: for tables, where few are served.

`optsched.bounds.checker.class_paths` has the notation, the proof, and the value of what is found
here in floating point: a price of machine time on cells, and two multipliers of each request.
A multiplier nu says that a token pays at least nu less the integral over its batch of g, the max
over classes of (nu - price c) / lo, or 0: c is the charge of the token there, and lo the begin of
the class.
`optsched.bounds.classes` lets each token choose its moment alone, which suits queues. Where
requests run at once, their latency is that of a path, and this bound is the larger one.

*Prices used.* They begin in proportion to a power of the number of requests in the system of a
schedule that is quickly made. An ascent raises them where the best paths use more machine time than
there is, and lowers them elsewhere. Multipliers are the best of some around the last ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import BoundTask
from optsched.bounds.busy_time import cell_at
from optsched.bounds.charges import Charges, class_charges, targets_of
from optsched.bounds.checker.class_paths import prefill_charges
from optsched.bounds.checker.classes import ExactCharges, exact_charges, min_charge, prefill_end
from optsched.bounds.checker.requests import Part
from optsched.bounds.leaves import CLASS_UNIT, class_paths_leaf
from optsched.bounds.shares import in_system
from optsched.bounds.shares_kernel import (
    WINDOW,
    Phase,
    Window,
    best_end,
    end_prefill,
    end_steps,
    find_soonest,
    new_window,
)
from optsched.costs.batch import EMPTY, add_decode, batch_time
from optsched.problem.budget import Budget
from optsched.problem.kernel import njit

Floats = NDArray[np.float64]
# Multipliers tried at first, of those at a steady price, and later, of the best ones so far.
_FIRST_LEVELS = np.array([0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.7, 2.5, 4.0, 8.0, 16.0])
_APART = [0.01, 0.03, 0.07, 0.12, 0.2, 0.3, 0.5, 0.8]
_LEVELS: Floats = np.exp([0.0, *_APART, *(-one for one in _APART)]).round(3)
# Cells in the mean latency, and the max number of them.
_PER_LATENCY, _MAX_CELLS = 40, 100_000
# The first price where so many requests are in the system: their number to this power.
_POWER = 1.3
# The first step of the logarithms of prices, after how many steps it is half as long, parts of the
# earlier gradients and of their squares in the means, and what keeps a small one from counting.
_STEP, _HALF, _KEPT, _KEPT_LONG, _SMALL = 0.3, 12, 0.6, 0.9, 0.1
# Steps multiply prices, so a price of 0 would never rise.
_LOWEST_PRICE = 1e-3
# Steps without a better value after which the ascent goes back, and after which it ends.
_PATIENCE, _STALE = 5, 25
# What counts as better then, relatively: smaller gains may go on for as long as one waits.
_GAIN = 1e-6
# Mean number of requests in the system beyond which paths are longer than is worth the time.
MAX_IN_SYSTEM = 60.0


# Decodes at whose times classes begin, and further begins, as multiples of the longest of these.
_DECODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128)
_BEYOND = (1.03, 1.06, 1.12, 1.25, 1.6, 2.5)
# Classes begin so much below these, relatively, and are so much apart at least.
_BELOW, _APART_LEAST = 1e-6, 3e-3
# How far charges may be below the best ones, relatively: the scans for less take most of the time.
_NEAR = 8e-3
# The quantile of prompts from which on refills are not free.
_SHORT = 0.1
# What is left of all requests' tokens in the batches for which charges are best: decodes, tokens
# that they have cached and hold, prefill tokens and their positions. Most batches prefill little.
FEW_PREFILLS = np.array([1.0, 1.0, 1.0, 0.3, 0.15])


def path_charges(task: BoundTask, budget: Budget) -> Charges:
    """Return charges of classes that begin where batches of so many decodes do, a vector each.

    Such a class has no batch much shorter than that of k decodes, and the one before it has none
    with k of them: so its charges are those of k - 1.
    """
    sums, times = EMPTY, []
    for _ in range(max(_DECODES)):
        sums = add_decode(sums, 1)  # over one cached token, as the checker counts them
        times.append(float(batch_time(task.cost_model.array, sums)))

    begins = [times[k - 1] * (1 - _BELOW) for k in _DECODES]
    begins += [times[-1] * more for more in _BEYOND]

    def edges_above(shortest: float) -> list[float]:
        """Return the begins that are near neither the shortest batch nor the begin before."""
        edges = [shortest]
        for begin in sorted(begins):
            if begin > edges[-1] * (1 + _APART_LEAST):
                edges.append(begin)

        return edges[1:]

    # The first target has the tokens of all requests.
    mix = targets_of(task.instance, 2)[:1] * FEW_PREFILLS
    instance = task.instance
    longest = instance.prompt_tokens + instance.output_tokens
    # What is between two numbers of cached tokens is, too: both charges are affine in it.
    refills = np.quantile(instance.prompt_tokens, _SHORT), longest.max()
    return class_charges(task, mix, edges_above, budget, _NEAR, refills)


class Paths(NamedTuple):
    """What all paths have in common, in seconds from the first arrival; columns have shape (n,).

    ``first`` and ``alone`` are the least times of the prefill and of all batches. ``charges`` has
    what a prefill and each later token pay in each class, shape (n, 2, classes), and ``lo`` the
    begins of the classes.
    """

    arrival: Floats
    first: Floats
    alone: Floats
    steps: Floats
    charges: Floats
    lo: Floats


def paths_of(part: Part, classes: list[ExactCharges], reference: int) -> Paths:
    """Return the paths of a part's requests, by the checker's charges and least times.

    ``reference`` is the class by whose charges a prefill is split into chunks (the checker's text).
    """
    shortest = classes[0].lo * part.ticks // CLASS_UNIT  # ticks of the shortest batch
    first = np.array([prefill_end(part, i, shortest) for i in range(len(part.requests))])
    steps = np.array([request.steps for request in part.requests], dtype=np.float64)
    charges = [
        (prefill_charges(classes, reference, s), [min_charge(b, s) for b in classes])
        for s in (request.prompt for request in part.requests)
    ]
    # All becomes seconds: ticks, and units of 1 / `CLASS_UNIT` s. The first three columns are
    # arrivals and the least times of prefills and of all batches.
    return Paths(
        np.array(part.arrival, dtype=np.float64) / part.ticks,
        first / part.ticks,
        (first + steps * shortest) / part.ticks,
        steps,
        np.array(charges, dtype=np.float64) / CLASS_UNIT,
        np.array([b.lo for b in classes], dtype=np.float64) / CLASS_UNIT,
    )


@njit
def _best_class(nu: float, price: float, charges: Floats, lo: Floats) -> tuple[float, int]:
    """Return g, the max of (nu - price c) / lo over classes, and its class, or 0 and -1.

    It is 0 where no class leaves any of nu: there the path waits.
    """
    gain, best = 0.0, -1
    for b in range(len(lo)):
        value = (nu - price * charges[b]) / lo[b]
        if value > gain:
            gain, best = value, b

    return gain, best


@njit
def _integrate_gains(
    window: Window, phase: Phase, charges: Floats, lo: Floats, width: float, span: int
) -> None:
    """Fill in g of one multiplier, cell by cell, and its integral from the arrival on.

    ``charges`` and ``lo`` are by class, and ``span`` cells of the window are used.
    """
    window.area[0] = 0.0
    for j in range(span):
        window.gains[j] = _best_class(phase.nu[0], window.price[j], charges, lo)[0]
        length = width if j > 0 else phase.lead
        window.area[j + 1] = window.area[j] + window.gains[j] * length


@njit(nogil=True)
def costs_of_paths(
    paths: Paths,
    width: float,
    price: Floats,
    levels: Floats,
    centre: Floats,
    window: Window,
    use: Floats,
) -> float:
    """Return the sum of the min costs of all paths.

    ``levels`` are multipliers as multiples of those in ``centre``, shape (n, 2), for the prefill
    and for the steps of each request. ``centre`` receives the best ones, and ``use`` is raised by
    the machine time that the best paths use, as a share of each cell. The loops over ends are those
    of `optsched.bounds.shares_kernel`, which do not read own work and fixed costs of a phase: these
    are 0 here. Pairs by ``step`` are for the prefill (0) and for the steps (1). ``window`` is
    scratch for one request after another, of which ``span`` cells from its arrival's on are used.
    """
    total, cells, lo = 0.0, len(price), paths.lo
    for i in range(len(paths.arrival)):
        arrival, steps, first, alone = (
            paths.arrival[i],
            paths.steps[i],
            paths.first[i],
            paths.alone[i],
        )
        c0 = cell_at(arrival, width)
        # The window is guessed at twice the time alone, and doubled below until it is enough.
        lead, span = (c0 + 1) * width - arrival, min(WINDOW, 32 + int(2 * alone / width))
        nus = np.empty((2, len(levels)))
        for step in range(2):
            nus[step] = centre[i, step] * levels

        while True:
            for j in range(span):
                window.price[j] = price[c0 + j] if c0 + j < cells else 0.0
                window.cheapest[j] = 0.0  # the growth of charges with KV is left out

            # A phase has its multiplier twice, for the first and the last batch. Then 0 is its work
            # and its fixed cost, and behind these is how many batches pay: one of a prefill.
            for k in range(len(levels)):
                nu = nus[0, k], nus[0, k]
                phase = Phase(arrival, c0, lead, first, alone, nu, (0.0, 0.0), 0.0, 1.0, i)
                _integrate_gains(window, phase, paths.charges[i, 0], lo, width, span)
                end_prefill(window, width, phase, span, k)

            find_soonest(window, span)
            for k in range(len(levels) if steps > 0 else 0):
                nu = nus[1, k], nus[1, k]
                phase = Phase(arrival, c0, lead, first, alone, nu, (0.0, 0.0), 0.0, steps, i)
                _integrate_gains(window, phase, paths.charges[i, 1], lo, width, span)
                end_steps(window, width, phase, 0.0, span, k)

            best, last = best_end(window, width, phase, steps, span)
            # An end beyond the window costs its latency at least. If that is no less than the best
            # end inside, or the window is as long as may be, the search is over.
            beyond = (c0 + span) * width - arrival
            if beyond >= best or span == WINDOW:
                break

            span = min(WINDOW, 2 * span)

        total += min(best, beyond)
        # No end is in the window, so there is no path to follow.
        if last < 0:
            continue

        # Go back along the best path: from the end of the steps to their start, and then along the
        # prefill, which ends there. A start of -1 - c is one in cell c whose steps pay nothing.
        j = last
        for step in range(1 if steps > 0 else 0, -1, -1):
            start = 0 if step == 0 else window.begin[j]
            level = window.level[j] if step == 0 else window.level_after[j]
            centre[i, step] = nus[step, level]
            # Steps that pay nothing (start < 0) use nothing: their range is empty.
            for c in range(c0 + max(start, 0), min(c0 + j + 1, cells) if start >= 0 else 0):
                charges = paths.charges[i, step]
                b = _best_class(nus[step, level], price[c], charges, lo)[1]
                # g falls by charge / lo with each unit of the price: that is what the path uses.
                if b >= 0:
                    use[c] += charges[b] / lo[b] * (1.0 if c > c0 else lead / width)

            j = start if start >= 0 else -1 - start

    return total


def ascend(
    part: Part, charges: Charges, finish: Floats, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Return the leaf of the best value that an ascent on prices finds.

    The first vector of each class is used. ``finish`` says when requests may end, in seconds from
    the first arrival. Gradients are averaged and normed, as in Adam (Kingma and Ba 2015): that of a
    price is the share of its cell that the best paths use, less 1. Without a better value the
    ascent goes back, with shorter steps.
    """
    # A leaf without cells has the charges as the checker rounds them; nothing else of it is used.
    rows, reference = (charges.lo, charges.vectors[:, 0]), len(charges.lo) - 1
    none = np.zeros(0)
    classes = exact_charges(class_paths_leaf((1.0, none), none, np.zeros((0, 2)), reference, rows))
    paths = paths_of(part, classes, reference)
    end = max(float(finish.max()), float((paths.arrival + paths.alone).max()))
    width = max(float((finish - paths.arrival).mean()) / _PER_LATENCY, end / _MAX_CELLS)
    cells = int(end / width) + 2
    number = in_system(paths.arrival, finish, width, cells)
    price = np.maximum(np.maximum(number, 0) ** _POWER, _LOWEST_PRICE)
    # First multipliers are those that pay for a batch of the best class at the arrival's price.
    steady = price[np.minimum((paths.arrival / width).astype(np.int64), cells - 1)]
    centre = (paths.lo + steady[:, None, None] * paths.charges).min(axis=2)
    window, mean, square = new_window(), np.zeros(cells), np.zeros(cells)
    # The best prices and multipliers, their value, steps since, the size of a step, and all steps.
    best, reached, stale, length, step = (price, centre), -np.inf, 0, _STEP, 0

    while stale < _STALE and (step == 0 or not stop()):
        tried, use = centre.copy(), np.zeros(cells)
        levels = _LEVELS if step > 0 else _FIRST_LEVELS
        value = costs_of_paths(paths, width, price, levels, centre, window, use)
        # Requests are paid at most the integral of the price, so this comes off their costs.
        value -= float(price.sum()) * width
        stale += 1
        if value > reached:
            # The levels of the certificate are those around the multipliers that were tried. The
            # first step tries others, but level 1 of its best multipliers is among them.
            if value > reached + _GAIN * abs(value):
                stale = 0

            reached = value
            best = price.copy(), (tried if step > 0 else centre.copy())
        elif stale % _PATIENCE == 0:
            price, centre = best[0].copy(), best[1].copy()
            length, mean[:] = length / 2, 0.0

        step += 1
        # Both means begin at 0, so each is divided by the weights that it has had so far.
        mean = _KEPT * mean + (1 - _KEPT) * (use - 1)
        square = _KEPT_LONG * square + (1 - _KEPT_LONG) * (use - 1) ** 2
        size = np.sqrt(square / (1 - _KEPT_LONG**step)) + _SMALL
        rise = mean / (1 - _KEPT**step) / size
        price = np.maximum(price * np.exp(length / (1 + step / _HALF) * rise), _LOWEST_PRICE)

    return class_paths_leaf((width, best[0]), _LEVELS, best[1], reference, rows)
