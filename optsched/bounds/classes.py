r"""Charges by batch length: the bound for tabulated models, and prices and mixtures for it.

docs/formulations.md, "Prices by batch length", has the notation and the proof, and
`optsched.bounds.checker.classes` the bound, which this module evaluates there. Here prices,
mixtures and weights are looked for in floating point, and any are valid. A token has the weight
theta of its request's latency, and Theta is the weight of all tokens before it and half of its own.

*Mixtures.* The charges that are valid for a class are a convex set, so any mean of its vertices is
valid. One mixture per class serves all tokens. Where tokens differ much in their KV, the ascent
weighs the vertices by what they gain.

*Ascent.* The minimum over moments and classes is smoothed as in `optsched.bounds.ascent`, with a
temperature in seconds of waiting that falls. For fixed mixtures the value is concave in the prices,
and for fixed prices in the mixtures; prices and the logarithms of the mixtures' weights climb by
L-BFGS, all together. The weight of the first token is that of its charges in the class with which
prices begin.

*Arrays.* A vector of charges has five: 0 for a decode, 1 for a token that it has cached, 2 for a
token that it holds, 3 for a prefill token, and 4 for a token before that one in its request.

*Prices to begin with* are those of `busy_time`, with the charges of one class as the machine time
of each request. Each class is tried, as long as there is time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.ascent import climb
from optsched.bounds.base import MINORANTS, Bound, BoundTask, Proof, of_table
from optsched.bounds.batch import PROVED_FOR
from optsched.bounds.busy_time import cell_at, schedule_prices
from optsched.bounds.certificate import cost_model_dict
from optsched.bounds.charges import Charges, class_charges, targets_of
from optsched.bounds.checker.class_paths import paths_value
from optsched.bounds.checker.classes import exact_charges, prefill_end, value_of
from optsched.bounds.checker.parts import Rejected, Unlimited
from optsched.bounds.checker.requests import Part
from optsched.bounds.checker.seconds import parts_of
from optsched.bounds.class_paths import FEW_PREFILLS, MAX_IN_SYSTEM, ascend, path_charges
from optsched.bounds.leaves import TICKS_PER_SECOND, classes_leaf, seconds_of
from optsched.bounds.shares import completions_of
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget, work_time
from optsched.problem.errors import OutOfTimeError
from optsched.problem.kernel import njit

Floats = NDArray[np.float64]
# Classes, and cells of time and chords over a request's decode steps in the ascent: of a first one,
# and of one that begins where it ended, if there is time for that.
_COARSE, _FINE = (24, (400, 4)), (64, (800, 8))
# The time that the second one takes, as a multiple of the first one's.
_LONGER = 2.0
# Cells of time reach so much beyond the end of the schedule that prices begin with.
_LATER = 1.15
# Seconds of waiting that count as much as nothing in the soft minimum, one after another.
_TEMPERATURES = (2.0, 0.7, 0.3, 0.1, 0.03)
# The temperature from which on an ascent goes on that begins where another one ended.
_WARM = 0.3
# Max steps at a temperature.
_STEPS = 200
# Gains in the last steps, relative to what machine time costs, that end a temperature.
_TOLERANCE = 1e-5
# The logarithm of a vertex's weight per unit of the variable that is climbed.
_LOGIT = 4.0
# Weights below exp(-20) of the largest are left out of a soft minimum.
_CUT = 20.0
# Multiples of the prices of a schedule that the ascent may begin with.
_SCALES = (1.0, 0.7, 0.4, 0.2)
# The share of the time within which charges have to be found.
_CHARGES_SHARE = 0.8
# The share of the time that paths may take, where few requests are in the system.
_PATHS_SHARE = 0.6
# Targets, of which there are as many of each kind.
_LENGTHS = 12


class Ends(NamedTuple):
    """Ends of chords: what tokens there pay, and when. Columns have the shape (ends,).

    Each stands for so many ``tokens``. ``theta`` and ``later`` are its weights theta and Theta, and
    ``earliest`` its first moment in seconds. One of a prefill pays for its place ``at`` in the
    prompt, and one of a later token, where ``steps`` is 1, for ``at`` cached ones.
    """

    tokens: Floats
    earliest: Floats
    theta: Floats
    later: Floats
    at: Floats
    steps: NDArray[np.int64]


@njit
def charge(vector: Floats, at: float, is_step: bool) -> float:
    """Return what a token pays: `optsched.bounds.checker.classes` says which.

    ``vector`` has the charges of a class, as in `Charges`, and ``at`` is that of `Ends`.
    """
    if not is_step:
        return vector[3] + vector[4] * at

    # It comes from a decode step, or from a refill of all tokens so far.
    return min(vector[0] + vector[1] * at + vector[2] * (at + 1), vector[3] * (at + 1))


@njit
def _lower_envelope(paid, fixed, order, until):  # type: ignore[no-untyped-def]
    """Return how many lines ``fixed[b] + price paid[b]`` are least for some price >= 0.

    A line is that of class b: ``fixed`` is its cost at price 0, and ``paid`` what it rises by.
    ``order`` receives them by ascending price, and ``until`` the price up to which each is least.
    The first is the least at price 0. Each is followed by the line that crosses it next, which is
    one that rises less (-1: there is none); of several that cross it there, by the one that rises
    least.
    """
    here = 0
    for b in range(1, len(paid)):
        if fixed[b] < fixed[here] or (fixed[b] == fixed[here] and paid[b] < paid[here]):
            here = b

    size, price = 0, 0.0
    while here >= 0:
        follower, at = -1, np.inf
        for b in range(len(paid)):
            if paid[b] < paid[here]:
                cross = max(price, (fixed[b] - fixed[here]) / (paid[here] - paid[b]))
                if cross < at or (cross == at and paid[b] < paid[follower]):
                    at, follower = cross, b

        order[size], until[size] = here, at
        size, here, price = size + 1, follower, at

    return size


@njit(nogil=True)
def soft_costs(ends, lo, mixed, market, tau, use, gain):  # type: ignore[no-untyped-def]
    """Return the sum over ends of the soft minima over cells, at a temperature in seconds.

    ``ends`` is an `Ends`. ``lo`` has the begins of classes, and ``mixed`` their charges, shape
    (classes, 5) (module's text, Arrays). ``market`` has the width of a cell and prices. ``use``
    receives the derivatives by the price of each cell, and ``gain`` those by the charges of each
    class, shape (classes, 5). An end costs theta times its wait, the price times what its class
    charges it (``paid``), and Theta times the begin of the class (``fixed``).
    """
    width, price = market
    cells, classes = len(price), len(lo)
    use[:] = 0.0
    gain[:] = 0.0
    total = 0.0
    paid, fixed, until = np.empty(classes), np.empty(classes), np.empty(classes)
    order = np.empty(classes, np.int64)
    cost, at_class = np.empty(cells + 1), np.empty(cells + 1, np.int64)

    for e in range(len(ends.tokens)):
        theta, later, at, is_step = ends.theta[e], ends.later[e], ends.at[e], ends.steps[e] == 1
        # A second of waiting costs theta, and so ``heat`` is the temperature as a cost. One of 0
        # would be divided by.
        earliest, heat = ends.earliest[e], max(tau * ends.theta[e], 1e-300)
        for b in range(classes):
            paid[b] = charge(mixed[b], at, is_step)
            fixed[b] = later * lo[b]

        # In each cell the best class is one of the envelope, found from that of the cell before.
        # ``place`` is its place there; the last line is the least up to any price.
        _lower_envelope(paid, fixed, order, until)
        first = cell_at(earliest, width)
        least, free = np.inf, fixed[order[0]]
        c, wait, place = first, 0.0, 0

        # A cell costs its wait and the least for a length (``free``), or more: later ones weigh
        # nothing.
        while wait + free < least + _CUT * heat:
            if c >= cells:  # no price from here on, so no class (-1) charges anything
                c = cells
                cost[c], at_class[c] = wait + free, -1
                least = min(least, cost[c])
                c += 1
                break

            while until[place] < price[c]:
                place += 1
            while place > 0 and until[place - 1] >= price[c]:
                place -= 1

            b = order[place]
            cost[c], at_class[c] = wait + price[c] * paid[b] + fixed[b], b
            least = min(least, cost[c])
            c += 1
            wait = theta * (c * width - earliest)

        # From here on ``cost`` has the weights of cells, of which the largest is 1. All moments
        # without a price share the place behind the last cell.
        mass = 0.0
        first = min(first, cells)
        for k in range(first, c):
            cost[k] = np.exp((least - cost[k]) / heat) if cost[k] < least + _CUT * heat else 0.0
            mass += cost[k]

        total += ends.tokens[e] * (least - heat * np.log(mass))
        for k in range(first, min(c, cells)):
            if cost[k] > 0:
                b = at_class[k]
                p = ends.tokens[e] * cost[k] / mass
                use[k] += p * paid[b]
                pays = p * price[k]
                # By the charges that the token pays here: for its prefill, a decode or a refill.
                if not is_step:
                    gain[b, 3] += pays
                    gain[b, 4] += pays * at
                elif paid[b] < mixed[b, 3] * (at + 1):
                    gain[b, 0] += pays
                    gain[b, 1] += pays * at
                    gain[b, 2] += pays * (at + 1)
                else:
                    gain[b, 3] += pays * (at + 1)

    return total


def ends_of(part: Part, top: Floats, shortest: float, first: Floats, chords: int) -> Ends:
    """Return the ends of all requests' chords.

    `top` is the vector of the last class, `shortest` the seconds of the shortest batch, `first` the
    weight of each request's first token, and later tokens have so many `chords`. The proof is in
    `optsched.bounds.checker.classes`.
    """
    rows: list[tuple[float, ...]] = []
    second = 1.0 / part.ticks  # the seconds of a tick
    weights = part.weight or [1] * len(part.requests)
    for i, request in enumerate(part.requests):
        # Tokens after the first, those of the prompt, theta of the first, and seconds. All weights
        # are times that of the request.
        m, s, theta, arrival = request.steps, request.prompt, first[i], part.arrival[i] * second
        # One chord goes over the prompt, and each of its ends stands for half of the tokens. These
        # share theta in proportion to what they pay, or equally if they pay nothing, and have half
        # of their weight as Theta. Rows have the columns of `Ends`.
        whole = top[3] * s + top[4] * s * (s - 1) / 2
        for p in (0, s - 1):
            weight = weights[i] * theta * ((top[3] + top[4] * p) / whole if whole > 0 else 1 / s)
            rows.append((s / 2, arrival, weight, weight / 2, p, 0))

        # Later tokens without a weight would pay nothing for their wait. The checker counts what
        # they cost for their length, and the ascent does not.
        if m == 0 or theta >= 1:
            continue

        # All have the same weight, and each of a chord begins no earlier than its first one.
        each = weights[i] * (1 - theta) / m
        for block in range(chords):
            low, high = m * block // chords, m * (block + 1) // chords
            # The least ticks until the first token. Each later one takes a shortest batch or more.
            before = prefill_end(part, i, round(shortest * part.ticks))
            earliest = arrival + before * second + low * shortest
            # With fewer tokens than chords some chords are empty.
            for j in (low, high - 1) if high > low else ():
                later = weights[i] * theta + each * (j + 0.5)
                rows.append(((high - low) / 2, earliest, each, later, s + j, 1))

    columns = np.array(rows).T.copy()
    tokens, earliest, weight, later, at, is_step = columns
    return Ends(tokens, earliest, weight, later, at, is_step.astype(np.int64))


class _Ascent:
    """Prices and mixtures of one part, and the steps that improve them.

    `vertices` has charges by class, vertex and (decode, context, memory, prefill, position). The
    ascent begins with the best of some multiples of the prices of schedules, one for each class by
    whose charges requests take machine time. The variables that are climbed, ``x``, are the prices
    over the highest one that the ascent begins with, and then the logits of the mixtures' weights
    over `_LOGIT`, by class and vertex. ``size`` has the numbers of cells and chords. It may begin
    where a coarser ascent ended, `since`.
    """

    def __init__(
        self,
        part: Part,
        charges: Charges,
        size: tuple[int, int],
        stop: Callable[[], bool],
        since: "_Ascent | None" = None,
    ) -> None:
        self.part, self.charges, self.stop = part, charges, stop
        self.vertices, (cells, self.chords) = charges.vectors, size
        classes, each = self.vertices.shape[:2]
        self.mixture = np.full((classes, each), 1 / each)
        self.temperatures: tuple[float, ...] = _TEMPERATURES
        if since is not None:
            self.temperatures = tuple(tau for tau in _TEMPERATURES if tau <= _WARM)
            self._begin_with(since, cells)
            return

        release = np.array(part.arrival, dtype=np.float64) / part.ticks
        best = -np.inf
        begins: tuple[Any, ...] = ()

        for reference in range(classes):
            if begins and stop():
                break

            # The seconds of machine time that each request is charged, in this class.
            prefill, steps = self._machine(self.mixed[reference])
            whole = np.maximum(prefill + steps, 1e-12)
            # Without later tokens the first one has all of the weight.
            self.first = np.where(steps > 0, prefill / whole, 1.0)
            # The schedule has fewer cells than there are: in those behind it the price is 0.
            weight = np.array(part.weight, np.float64) if part.weight else None
            few = int(cells / _LATER)
            price, self.width = schedule_prices(release, whole, few, weight)
            self.price = np.append(price, np.zeros(cells - len(price)))
            self._set_ends(reference)
            # The lowest temperature is the nearest to the min that counts.
            for scale in _SCALES:
                value = self.smooth(scale * self.price, _TEMPERATURES[-1])[0]
                if value > best:
                    best = value
                    begins = self.first, self.width, scale * self.price, reference

        self.first, self.width, self.price, self.reference = begins
        self.highest = max(float(self.price.max()), 1e-3)
        self._set_ends(self.reference)

    @property
    def mixed(self) -> Floats:
        """The mixed vector of each class, shape (classes, 5)."""
        return np.einsum("bv,bvx->bx", self.mixture, self.vertices)

    def _machine(self, vector: Floats) -> tuple[Floats, Floats]:
        """Return the charges of each request's prefill and of its steps in a class.

        All steps are charged like the middle one.
        """
        requests = self.part.requests
        s = np.array([one.prompt for one in requests], dtype=np.float64)
        m = np.array([one.steps for one in requests], dtype=np.float64)
        middle = s + (m - 1) / 2
        step = vector[0] + vector[1] * middle + vector[2] * (middle + 1)
        steps = m * np.minimum(step, vector[3] * (middle + 1))
        return vector[3] * s + vector[4] * s * (s - 1) / 2, steps

    def _set_ends(self, reference: int) -> None:
        """Set the ends of chords, with first tokens split by the charges of one class."""
        shortest = float(self.charges.lo[0])
        self.ends = ends_of(self.part, self.mixed[reference], shortest, self.first, self.chords)

    def _begin_with(self, since: "_Ascent", cells: int) -> None:
        """Begin with prices and mixtures of another ascent, in so many cells of the same time."""
        width = since.width * len(since.price) / cells
        at = ((np.arange(cells) + 0.5) * width / since.width).astype(np.int64)
        self.width, self.price = width, since.price[np.minimum(at, len(since.price) - 1)]
        self.first, self.highest = since.first, since.highest

        def class_of(length: Any) -> Any:
            """Return the class of the other ascent that begins last up to a length."""
            return np.maximum(np.searchsorted(since.charges.lo, length, side="right") - 1, 0)

        # The shortest batch of both is the same, but for rounding.
        self.mixture = since.mixture[class_of(self.charges.lo)]
        longest = since.charges.lo[since.reference]
        later = np.searchsorted(self.charges.lo, longest, side="right")
        self.reference = max(int(later) - 1, 0)
        self._set_ends(self.reference)

    def smooth(self, price: Floats, tau: float) -> tuple[float, Floats, Floats]:
        """Return the smoothed bound and its derivatives by prices and by charges."""
        use, gain = np.empty(len(price)), np.empty((len(self.mixture), 5))
        market = self.width, price
        total = soft_costs(self.ends, self.charges.lo, self.mixed, market, tau, use, gain)
        return float(total - price.sum() * self.width), use - self.width, gain

    def _joint(self, x: Floats, tau: float) -> tuple[float, Floats]:
        """Return the smoothed bound and its gradient by prices and logits of mixtures, scaled."""
        self._unpack(x)
        value, use, gain = self.smooth(self.price, tau)
        # A weight is exp(logit) over the sum of its class: its derivative has the mean taken off.
        by_vertex = np.einsum("bx,bvx->bv", gain, self.vertices)
        mean = (self.mixture * by_vertex).sum(axis=1, keepdims=True)
        logits = self.mixture * (by_vertex - mean) * _LOGIT
        return value, np.concatenate([use * self.highest, logits.ravel()])

    def _unpack(self, x: Floats) -> None:
        """Set prices and mixtures to the variables that are climbed, which are scaled."""
        self.price = x[: len(self.price)] * self.highest
        logits = _LOGIT * x[len(self.price) :].reshape(self.mixture.shape)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        self.mixture = weights / weights.sum(axis=1, keepdims=True)

    def run(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Climb at falling temperatures, and give `take` the leaf that was found after each."""
        # Prices are relative to the highest of the first ones. Logits are such that those of equal
        # weights are 1. `climb` keeps all variables from 0 to 3.
        each = self.mixture.shape[1]
        logits = 1 + np.log(np.maximum(self.mixture * each, 1e-300)).ravel() / _LOGIT
        x = np.concatenate([self.price / self.highest, np.clip(logits, 0, 3)])
        for tau in self.temperatures:
            if self.stop():
                break

            paid = float(self.price.sum()) * self.width  # what all machine time costs
            x = climb(
                lambda x, tau=tau: self._joint(x, tau),  # type: ignore[misc]
                x,
                highest=1.0,
                iterations=_STEPS,
                tolerance=_TOLERANCE * paid,
                stop=self.stop,
            )
            self._unpack(x)
            take(self.leaf())

    def leaf(self) -> dict[str, Any]:
        """Return the leaf of the present prices and mixtures."""
        rows = self.charges.lo, self.mixed
        return classes_leaf(self.width, self.price, self.first, self.reference, rows)


def _take_paths(task: BoundTask, part: Part, budget: Budget, take: Callable[..., None]) -> None:
    """Give `take` the leaf of paths, unless so many requests are in the system that it is no use.

    `take` is that of `classes`, which keeps a leaf if it proves more.
    """
    arrival = np.array(part.arrival, dtype=np.float64) / part.ticks
    task = task.part(np.argsort(task.instance.release_times, kind="stable"))
    alone = np.array([part.floor(request.chain) for request in part.requests]) / part.ticks
    finish = np.maximum(arrival, completions_of(task, task.instance, alone))
    # The sum of latencies over the whole time is the mean number in the system (Little's law).
    if (finish - arrival).sum() > MAX_IN_SYSTEM * finish.max():
        return

    try:
        charges = path_charges(task, budget)
        take(ascend(part, charges, finish, lambda: budget.over), paths_value)
    except (Rejected, OutOfTimeError):
        pass  # the rest of the time is for charges that suit queues


def classes(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency, weighted or not, in seconds."""
    cost = task.cost_model
    assert isinstance(cost, BatchCost)
    order = np.argsort(task.instance.release_times, kind="stable").tolist()
    model = cost_model_dict(cost)
    best: tuple[int, dict[str, Any] | None] = 0, None  # in ticks, and the leaf that proves it
    proving_s = 0.0

    def take(leaf: dict[str, Any], value_of: Callable[..., int] = value_of) -> None:
        """Keep a leaf if it proves more, and measure what to prove it takes."""
        nonlocal best, proving_s
        before = work_time()
        value = value_of(part, leaf, exact_charges(leaf), Unlimited())
        proving_s = work_time() - before
        if value > best[0]:
            best = value, leaf

    try:
        # The one set of requests is all of them, in order of arrival.
        _, part = next(parts_of(task.instance, model, TICKS_PER_SECOND, [order]))
        weighted = task.goal.name == "weighted_latency"
        part = part if weighted else part._replace(weight=())
        # A linear model is one class; `shares` has its paths. Of weights paths are not proved.
        if cost.table is not None and not weighted:
            _take_paths(task, part, budget.part(_PATHS_SHARE), take)

        mixes = targets_of(task.instance, _LENGTHS)
        # One target has prefills alone, else refills would be free in short batches.
        prefills = mixes[0] * (0, 0, 0, 1, 1)
        targets = np.vstack([mixes, mixes * FEW_PREFILLS, prefills])
        ascent = None

        def is_over() -> bool:
            """Whether no more time is left than it takes to prove what the ascent ends with."""
            return budget.left_s <= proving_s

        for count, size in (_COARSE, _FINE):
            began = work_time()
            share = budget.part(_CHARGES_SHARE)
            charges = class_charges(task, targets, budget=share, count=count)
            ascent = _Ascent(part, charges, size, is_over, ascent)
            take(ascent.leaf())
            ascent.run(take)
            if budget.left_s < _LONGER * (work_time() - began):
                break
    except (Rejected, OutOfTimeError):
        pass  # the checker would refuse such a machine, or time is up: what was proved stands

    return Proof(seconds_of(best[0]), tree=best[1])


CLASSES = Bound(
    "classes",
    "prices of machine time, and charges by batch length",
    "second",
    ("tel", "weighted_latency"),
    classes,
    PROVED_FOR | MINORANTS,
    searches=True,
    suits=of_table,
    weight=8.0,
    certifies=True,
)
