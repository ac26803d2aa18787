"""Ascent on the Lagrangian dual of the memory rows, which finds good prices.

Nothing here has to be exact. The resulting prices are rounded to integers over a common
denominator, and `optsched.bounds.dual` evaluates those exactly. An error of this module can make a
bound weaker but never invalid.

The min over starts is smoothed: min f ~ -tau log sum exp(-f / tau). The smoothed value is concave
in the prices and below the min. As the ascent goes on, tau falls and buckets of rounds get smaller.
"""

import math
from collections.abc import Callable

import numpy as np

from optsched.bounds.dual import Prices, prices_in_rounds
from optsched.bounds.timeline import Floats, Model, busy_prices
from optsched.problem.kernel import njit

# Buckets (units of time) and temperatures (rounds) of the ascent, one after another.
_COARSE = ((16, 3.0), (8, 3.0), (8, 1.0), (8, 0.3), (4, 0.3), (2, 0.3))
_PLAN = (*_COARSE, (1, 0.3), (1, 0.1), (1, 0.03), (1, 0.01), (1, 0.003))
# Max climbs per entry of the plan.
_ROUNDS = 8
# Max number of buckets.
_FINEST = 1 << 16
# Max of requests times units for which the ascent goes on until it converges.
_SMALL = 200_000
# Number of pairs that L-BFGS keeps.
_MEMORY = 20
# Weights below exp(-25) of the largest are left out of a soft minimum.
_CUT = 25.0


def raise_dual(
    model: Model,
    *,
    over: Callable[[], bool],
    report: Callable[[Prices], None],
    weight: Floats | None = None,
) -> Floats:
    """Raise the dual, starting from the prices of a preemptive schedule.

    `over` says when time is up, and `report` is given prices whenever they may be better. Default
    weights are 1. Return the mean start of each request under the last prices, in units.
    """
    prices = busy_prices(model, weight)
    report(prices_in_rounds(model, prices))
    # A schedule ends later than the machine of the volume bound would: prices may go on.
    longest = int(model.output.max())
    units = len(prices) + min(longest, max(64, len(prices) // 16))
    padded = np.pad(prices, (0, units - len(prices)))
    smallest = -(-units // _FINEST)  # the units of a bucket at least: so there are not too many
    large = len(model.arrival) * units > _SMALL
    ascent = Ascent(model, padded, stop=over, weight=weight)

    for bucket, tau in _PLAN:
        if over():
            break
        # Fewer than 8 buckets say too little.
        if bucket > 1 and 8 * bucket > units:
            continue
        if ascent.bucket != bucket * smallest:
            ascent.resize(ascent.dense(), bucket * smallest)

        ascent.start_at(tau)
        for _ in range(_ROUNDS if large else 5 * _ROUNDS):
            tolerance = (1e-7 if large else 1e-9) * abs(ascent.value)
            gained = ascent.climb_if_better(
                tau, iterations=25 if large else 100, tolerance=tolerance
            )
            # A climb that gains less is the last at this temperature. With many requests coarse
            # buckets only prepare for finer ones, so a climb there has to gain more for another to
            # follow. If the trust is low, the climb was cut short, and another may gain.
            min_gain = 10 * tolerance
            if large:
                min_gain = (4e-6 if bucket == 1 else 2e-5) * ascent.value
            if over() or (gained < min_gain and (ascent.trust == 1.0 or not large)):
                break

        report(prices_in_rounds(model, ascent.dense()))

    return ascent.mean


@njit(nogil=True, error_model="numpy")
def _smooth(requests, windows, sums, tau, ends, mean):  # type: ignore[no-untyped-def]
    """Return the sum of the soft minima over every request's window.

    A soft minimum of f is -tau log sum exp(-f / tau). ``ends`` receives second differences of the
    mean KV use, and ``mean`` each request's mean start.
    ``requests`` has arrival, output, KV in the first unit, and weight by request, and the rounds of
    a unit; ``windows`` the first and last start; ``sums`` see `Ascent._sums`. Times are in units,
    and ``tau`` is in rounds of weighted latency. A start k costs

        f(k) = weight unit (k + o - arrival) + sum of price_t KV_t over the units t in (k, k + o],

    with the KV growing by ``unit`` a unit. Probabilities of starts are exp(-f / tau), normalized.
    """
    arrival, output, first_kv, weight, unit = requests
    lo, hi = windows
    price_sum, moment_sum = sums
    n, size = len(arrival), len(price_sum)
    widest = 0
    for i in range(n):
        widest = max(widest, hi[i] - lo[i] + 1)

    f = np.empty(widest)  # the costs of one request's starts, and later their weights
    # By unit, the expected number of runs that start or end there, and their KV in the first or
    # last unit.
    starts, starts_kv = np.zeros(size), np.zeros(size)
    stops, stops_kv = np.zeros(size), np.zeros(size)
    total = 0.0

    for i in range(n):
        o, base, cost_of_wait = output[i], lo[i], unit * weight[i]
        count = hi[i] - base + 1
        kv = first_kv[i]
        # A run from k on holds q + unit (t - k) in unit t, so that sums of prices and of moments,
        # price times t, give f(k). In its last unit it holds ``last``.
        q = kv - unit
        last = kv + unit * (o - 1)
        lowest = np.inf

        for j in range(count):
            k = base + j
            prices, moments = price_sum[k + o] - price_sum[k], moment_sum[k + o] - moment_sum[k]
            value = cost_of_wait * (k + o - arrival[i])
            value += (q - unit * k) * prices + unit * moments
            f[j] = value
            lowest = min(lowest, value)

        # From here on f has the weights of starts, of which the largest is 1.
        mass = mass_times_place = 0.0
        limit = lowest + _CUT * tau
        for j in range(count):
            # The others weigh less than exp(-25) of the largest, so they are left out.
            if f[j] < limit:
                p = math.exp((lowest - f[j]) / tau)
                f[j] = p
                mass += p
                mass_times_place += p * j
            else:
                f[j] = 0.0

        total += lowest - tau * math.log(mass)
        mean[i] = base + mass_times_place / mass
        for j in range(count):
            if f[j] > 0.0:
                p = f[j] / mass
                k = base + j
                starts[k] += p
                starts_kv[k] += p * kv
                stops[k + o] += p
                stops_kv[k + o] += p * last

    # A run's KV jumps to ``kv``, rises by ``unit`` a unit, and falls from ``last`` to 0: its second
    # differences are not 0 only beside its start and its end.
    ends[:] = 0.0
    for k in range(size):
        ends[k + 1] += starts_kv[k] - stops_kv[k] - unit * stops[k]
        ends[k + 2] += unit * starts[k] - starts_kv[k] + stops_kv[k]

    return total


@njit(nogil=True)
def _min_sum(requests, reach, sums, margin, windows):  # type: ignore[no-untyped-def]
    """Return the sum of minima over starts up to ``reach``; set windows of starts in ``margin``.

    Costs of starts and arguments are those of `_smooth`, and ``reach`` has the last start of each
    request. A window is from the first to the last start that costs at most ``margin`` more than
    the cheapest. Starts between that cost more are in it, too. Both arrays of ``windows`` change.
    """
    arrival, output, first_kv, weight, unit = requests
    lo, hi = windows
    price_sum, moment_sum = sums
    total = 0.0

    for i in range(len(arrival)):
        o, q, cost_of_wait = output[i], first_kv[i] - unit, unit * weight[i]
        lowest = np.inf
        stop = reach[i]

        for k in range(arrival[i], reach[i] + 1):
            delay = cost_of_wait * (k + o - arrival[i])
            # Prices are not negative, so all later starts cost their delay at least and are out of
            # the window.
            if delay > lowest + margin:
                stop = k
                break

            prices, moments = price_sum[k + o] - price_sum[k], moment_sum[k + o] - moment_sum[k]
            value = delay + (q - unit * k) * prices + unit * moments
            lowest = min(lowest, value)

        # Once the lowest cost is known, go through the same starts again for the window; -1: none
        # yet.
        first = last = -1
        for k in range(arrival[i], stop + 1):
            prices, moments = price_sum[k + o] - price_sum[k], moment_sum[k + o] - moment_sum[k]
            value = cost_of_wait * (k + o - arrival[i])
            value += (q - unit * k) * prices + unit * moments
            if value <= lowest + margin:
                last = k
                if first < 0:
                    first = k

        lo[i], hi[i] = first, last
        total += lowest

    return total


class Ascent:
    """Prices of one model, constant on buckets of units, and the steps that improve them.

    It begins with ``prices`` by unit, after which the price is 0, and ends where ``stop`` says so.
    ``price`` has the present prices, and ``mean`` the mean start of each request under the soft
    min, in units. Prices are of ``units`` units, from 1 on, in buckets of ``bucket``: a run that
    starts at k holds KV from unit k + 1 on. ``reach`` is the last start of each request that is
    looked at, and ``size`` the length of arrays by unit.
    """

    def __init__(
        self,
        model: Model,
        prices: Floats,
        *,
        stop: Callable[[], bool],
        weight: Floats | None = None,
    ) -> None:
        self.model = model
        self.stop = stop
        self.mean = model.arrival.astype(np.float64)
        self.resize(prices, bucket=1)
        self.weight = np.ones(len(model.arrival)) if weight is None else weight
        columns = model.arrival, model.output, model.first_kv, self.weight
        self._requests = *columns, float(model.unit)  # as `_smooth` reads them
        self._windows = model.arrival.copy(), model.arrival.copy()  # first and last starts
        self.trust = 1.0  # lower after climbs that were undone: then windows are wider
        self.value = -math.inf

    def resize(self, prices: Floats, bucket: int) -> None:
        """Set prices by unit, and the units of a bucket, whose price is the mean of its units'."""
        self.bucket = bucket
        buckets = -(-len(prices) // bucket)
        self.units = buckets * bucket
        padded = np.pad(prices, (0, self.units - len(prices)))
        self.price = padded.reshape(buckets, bucket).mean(axis=1)
        # Runs may start as late as the last unit with a price, or at the last arrival.
        latest = self.units + int(self.model.output.max())
        self.size = max(latest, int((self.model.arrival + self.model.output).max())) + 3
        # To start later than all prices and the arrival only adds latency.
        self.reach = np.maximum(self.units, self.model.arrival)

    def dense(self) -> Floats:
        """Return the prices, one per unit."""
        return np.repeat(self.price, self.bucket)

    def _sums(self, price: Floats) -> tuple[Floats, Floats]:
        """Return the sums of price, and of price * time, over the units up to each one."""
        dense = np.zeros(self.size)
        dense[1 : self.units + 1] = np.repeat(price, self.bucket)
        return np.cumsum(dense), np.cumsum(dense * np.arange(self.size))

    def refresh(self, margin: float, pad: int) -> float:
        """Set the windows to starts near the best ones; return the dual value over all starts.

        ``margin`` and ``pad`` are those of `_margin` and `_pad`.
        """
        model, (lo, hi) = self.model, self._windows
        total = _min_sum(self._requests, self.reach, self._sums(self.price), margin, (lo, hi))
        np.maximum(lo - pad, model.arrival, out=lo)
        np.minimum(hi + pad, self.reach, out=hi)
        self.value = float(total - model.instance.kv_capacity * self.bucket * self.price.sum())

        return self.value

    def smooth(self, price: Floats, tau: float) -> tuple[float, Floats]:
        """Return the smoothed dual value over the windows and its gradient, shape (buckets,).

        The gradient by the price of a bucket is the mean KV use there less the capacity.
        """
        model, ends = self.model, np.empty(self.size + 2)
        sums = self._sums(price)
        total = _smooth(self._requests, self._windows, sums, tau, ends, self.mean)
        # Second differences of the use by unit, summed up twice.
        use = np.cumsum(np.cumsum(ends))[1 : self.units + 1]
        per_bucket = use.reshape(-1, self.bucket).sum(axis=1)
        capacity = model.instance.kv_capacity * self.bucket

        return float(total - capacity * price.sum()), per_bucket - capacity

    def climb_if_better(self, tau: float, *, iterations: int, tolerance: float) -> float:
        """Climb from the best prices known, and return what is gained by a full evaluation.

        Windows make the dual look larger than it is. If the true value has fallen, the climb is
        undone, and the next has wider windows and fewer steps.
        """
        before, price = self.value, self.price
        # About what a KV token of a round may cost: the weight of one round's wait over the KV of a
        # start.
        start_price = float(self.weight.mean() / self.model.first_kv.mean())
        self.price = climb(
            lambda price: self.smooth(price, tau),
            price,
            highest=max(float(price.max()), start_price),
            iterations=max(3, int(iterations * self.trust)),
            tolerance=tolerance,
            stop=self.stop,
        )
        gain = self.refresh(self._margin(tau), self._pad()) - before

        # The climb was on windows, outside of which starts may be better: it is undone. Trust falls
        # faster than it comes back.
        if not gain > 0:
            self.price = price
            self.trust = max(0.1, self.trust / 2)
            self.refresh(self._margin(tau), self._pad())
            return 0.0

        self.trust = min(1.0, self.trust * 1.5)
        return gain

    def start_at(self, tau: float) -> None:
        """Set the windows for a new temperature or new buckets."""
        self.trust = max(self.trust, 0.5)
        self.refresh(self._margin(tau), self._pad())

    def _margin(self, tau: float) -> float:
        """Return by how much a start in the windows may cost more than the best one.

        Soft minima count starts up to `_CUT` tau. 20 rounds more are for how prices change.
        """
        return (_CUT * tau + 20.0) / self.trust * self.model.unit

    def _pad(self) -> int:
        """Return by how many units the windows are wider than the margin says."""
        return int(20 / self.trust)


Smooth = Callable[[Floats], tuple[float, Floats]]
"""Returns the value and the gradient at some prices."""


def climb(
    smooth: Smooth,
    start: Floats,
    *,
    highest: float,
    iterations: int,
    tolerance: float,
    stop: Callable[[], bool],
) -> Floats:
    """Maximize a smooth function of prices by L-BFGS on the free ones, projected on prices >= 0.

    The step is shortened along its projection until the value rises enough. `highest` is about the
    highest price at the start; a price is at most three times that.
    """
    x = start.copy()
    value, gradient = smooth(x)
    # Of past steps: how prices moved, how the gradient fell, and 1 over their inner product.
    pairs: list[tuple[Floats, Floats, float]] = []
    # The first step changes no price by more than 2 percent of the highest.
    scale = 0.02 * highest / max(float(np.abs(gradient).max()), 1e-9)
    history = [value]

    for _ in range(iterations):
        if stop():
            break

        # A price of 0 that should fall stays as it is.
        free = (x > 0) | (gradient > 0)
        direction = _two_loops(np.where(free, gradient, 0.0), pairs, scale)
        direction[~free] = 0.0

        # This is no direction of ascent: forget the pairs and follow the gradient.
        if not _dot(direction, gradient) > 0:
            pairs.clear()
            direction = np.where(free, gradient, 0.0) * scale

        reached = _line_search(smooth, (value, x, gradient), direction, 3 * highest, stop)
        # No step is good enough: try the gradient, a tenth as long; if it was the gradient, end.
        if reached is None:
            if not pairs:
                break

            pairs.clear()
            scale *= 0.1
            continue

        new_value, new_x, new_gradient = reached
        moved, turned = new_x - x, gradient - new_gradient
        product, square = _dot(moved, turned), _dot(turned, turned)
        # Only pairs of positive curvature keep the direction one of ascent.
        if product > 1e-10 * math.sqrt(_dot(moved, moved) * square):
            pairs.append((moved, turned, 1.0 / product))
            del pairs[:-_MEMORY]
            scale = product / square

        value, x, gradient = new_value, new_x, new_gradient
        history.append(value)
        # Eight steps gained next to nothing.
        if len(history) > 8 and value - history[-8] < tolerance:
            break

    return x


def _line_search(
    smooth: Smooth,
    start: tuple[float, Floats, Floats],
    direction: Floats,
    highest: float,
    stop: Callable[[], bool],
) -> tuple[float, Floats, Floats] | None:
    """Return value, prices and gradient after a step along the direction, or None.

    ``start`` has these before it. Prices stay from 0 to ``highest``. Steps get shorter, from 1 down
    to about 1e-6, until the value rises enough.
    """
    value, x, gradient = start
    step = 1.0
    for _ in range(12):
        trial = np.clip(x + step * direction, 0.0, highest)
        reached, slope = smooth(trial)
        # Armijo's rule: the value rises by a part of what the slope promises.
        if reached >= value + 1e-4 * _dot(gradient, trial - x):
            return reached, trial, slope

        step *= 0.3
        if stop():
            break

    return None


def _dot(x: Floats, y: Floats) -> float:
    # Not `x @ y`: for vectors of this length BLAS would wake its threads, which takes a hundred
    # times as long where the other cores are busy.
    return float((x * y).sum())


def _two_loops(gradient: Floats, pairs: list[tuple[Floats, Floats, float]], scale: float) -> Floats:
    """Return the L-BFGS direction of ascent (Nocedal and Wright 2006, algorithm 7.4).

    ``pairs`` has s, y and rho = 1 / (s y) of past steps, and ``scale`` is their gamma.
    """
    direction = gradient.copy()
    weights = []
    for moved, turned, inverse in reversed(pairs):
        weight = inverse * _dot(moved, direction)
        direction -= weight * turned
        weights.append(weight)

    direction *= scale
    for (moved, turned, inverse), weight in zip(pairs, reversed(weights), strict=True):
        direction += (weight - inverse * _dot(turned, direction)) * moved

    return direction
