"""The time axis of an instance in rounds without its gaps, and the prices that start the dual.

The gaps between blocks (`optsched.bounds.blocks`) are cut out. What remains is measured in units of
``unit`` rounds, which is 1 unless the time axis is very long. Within a unit a run is taken to hold
its mean KV.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.blocks import Blocks, blocks_of
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

MAX_UNITS = 1 << 21
"""Max length of the time axis, in units."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Model:
    """An instance of rounds with the gaps between blocks cut out and time in units of rounds.

    Arrivals and outputs are in units, and outputs at least 1. ``first_kv`` has the mean KV tokens
    held during the first unit; they grow by ``unit`` per unit.
    """

    instance: Instance
    unit: int
    arrival: Ints
    output: Ints
    first_kv: Floats
    blocks: Blocks


def model_of(instance: Instance) -> Model:
    """Return the model of an instance in rounds, whose units grow to keep within `MAX_UNITS`."""
    blocks = blocks_of(instance)
    unit = max(1, -(-int(blocks.end[-1]) // MAX_UNITS))
    growth = (unit - 1) / 2
    return Model(
        instance=instance,
        unit=unit,
        arrival=(instance.release_times - blocks.shift) // unit,
        output=np.maximum(1, (instance.output_tokens + unit // 2) // unit),
        first_kv=(instance.prompt_tokens + instance.kv_offset).astype(np.float64) + growth,
        blocks=blocks,
    )


def busy_prices(model: Model) -> Floats:
    """Return the prices that prove the mean-busy-time bound, one per unit of time.

    They are the dual of its linear program (docs/formulations.md, "Prices of memory"): the
    preemptive list schedule of `optsched.bounds.simple.mean_busy_time` is walked backward.
    """
    volume = model.output * (model.first_kv + (model.output - 1) * model.unit / 2)
    order = np.lexsort((volume, model.arrival))
    begin, end, job, size = _busy_pieces(
        model.arrival[order].astype(np.float64),
        (volume * model.unit)[order],
        float(model.instance.kv_capacity) * model.unit,
    )
    begin, end, job = begin[:size], end[:size], job[:size]
    slope = model.unit / (volume[order] * model.unit)
    length = math.ceil(float(end[-1]) - 1e-9) if size else 1

    return _backward(begin, end, job, slope, max(length, 1)) * model.unit


@njit(nogil=True)
def _busy_pieces(release, work, speed):  # type: ignore[no-untyped-def]
    """Return the pieces (begin, end, job) of the preemptive schedule, least work first.

    Among equals its heap takes another one than `heapq` would, and prices would not be the same.
    """
    n = len(release)
    begin, end = np.empty(3 * n + 3), np.empty(3 * n + 3)
    job = np.empty(3 * n + 3, np.int64)
    left = work.copy()
    heap = np.empty(n, np.int64)
    size = count = nxt = 0
    now = 0.0

    while nxt < n or size:
        if size == 0 and nxt < n and release[nxt] > now:
            now = release[nxt]
        while nxt < n and release[nxt] <= now:
            at = size
            size += 1
            heap[at] = nxt

            while at > 0 and work[heap[(at - 1) // 2]] > work[heap[at]]:
                up = (at - 1) // 2
                heap[at], heap[up] = heap[up], heap[at]
                at = up

            nxt += 1

        j = heap[0]
        until = now + left[j] / speed
        done = True

        if nxt < n and until > release[nxt]:
            until = release[nxt]
            done = False

        left[j] -= (until - now) * speed
        if count and job[count - 1] == j and end[count - 1] == now:
            end[count - 1] = until
        else:
            begin[count], end[count], job[count] = now, until, j
            count += 1

        now = until
        if done:
            size -= 1
            heap[0] = heap[size]
            at = 0

            while True:
                low = 2 * at + 1
                if low >= size:
                    break
                if low + 1 < size and work[heap[low + 1]] < work[heap[low]]:
                    low += 1
                if work[heap[low]] >= work[heap[at]]:
                    break

                heap[at], heap[low] = heap[low], heap[at]
                at = low

    return begin, end, job, count


@njit(nogil=True)
def _backward(begin, end, job, slope, length):  # type: ignore[no-untyped-def]
    """Return the mean price of each unit of time from the pieces, walked backward."""
    price = np.zeros(length)
    resumed = np.full(len(slope), -1.0)
    resumed_price = np.zeros(len(slope))
    now, level = np.inf, 0.0

    for piece in range(len(job) - 1, -1, -1):
        j, x, y = job[piece], begin[piece], end[piece]
        if y < now - 1e-9:
            level = 0.0
        if resumed[j] >= 0.0:
            level = resumed_price[j] + (resumed[j] - y) * slope[j]

        # The integral of the price over each unit that the piece meets.
        first, last = int(x), min(int(np.ceil(y)), length)
        for t in range(first, last):
            u, v = max(x, float(t)), min(y, float(t + 1))
            if v > u:
                price[t] += (v - u) * (level + (y - (u + v) / 2) * slope[j])

        level += (y - x) * slope[j]
        resumed[j], resumed_price[j] = x, level
        now = x

    return price
