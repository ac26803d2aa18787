"""The time axis of an instance in rounds without its gaps, and prices of preemptive schedules.

The gaps between blocks (`optsched.bounds.blocks`) are cut out. What remains is measured in units of
``unit`` rounds, which is 1 unless the time axis is very long. Within a unit a run is taken to hold
its mean KV.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.blocks import Blocks, blocks_of
from optsched.bounds.checker.requests import shortest_first
from optsched.problem.instance import Instance

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
    growth = (unit - 1) / 2  # from the first round of a unit to its mean
    # Outputs become the nearest number of units: prices are looked for here, and need not be exact.
    return Model(
        instance=instance,
        unit=unit,
        arrival=(instance.release_times - blocks.shift) // unit,
        output=np.maximum(1, (instance.output_tokens + unit // 2) // unit),
        first_kv=(instance.prompt_tokens + instance.kv_offset).astype(np.float64) + growth,
        blocks=blocks,
    )


def busy_prices(model: Model, weight: Floats | None = None) -> Floats:
    """Return the prices of the preemptive list schedule by least volume, one per unit of time.

    With weights it is by least volume per weight (Smith's rule). They are the dual of the
    mean-busy-time problem (docs/formulations.md, "Prices of memory"). The machine works off volume,
    KV tokens times units, at the KV capacity, and its price per unit of time is that of so many
    tokens.
    """
    volume = model.output * (model.first_kv + (model.output - 1) * model.unit / 2)
    per_token = model.unit / model.instance.kv_capacity
    length = volume / model.instance.kv_capacity
    price, _ = schedule_prices(model.arrival, length, weight=weight, width=1.0)
    return price * per_token


def schedule_prices(
    release: NDArray[Any],
    length: Floats,
    cells: int = 0,
    weight: Floats | None = None,
    width: float = 0.0,
) -> tuple[Floats, float]:
    """Return the dual prices of the preemptive schedule, and how long a cell of theirs is.

    Going back in time, the price rises with slope weight over length while a job runs, and it is
    continuous where one completes or another is taken up. At the end of a preempted piece it is the
    price at which the job resumes, plus what it rises by if the job runs until then. It is 0 before
    idle time. Cells have the ``width`` or are so many; their prices are means.
    """
    length = np.maximum(length, 1e-12)
    weight = np.ones(len(length)) if weight is None else weight
    pieces = shortest_first(release.tolist(), length.tolist(), (length / weight).tolist())
    starts, ends, jobs = map(np.array, zip(*pieces, strict=True))
    slope = weight / length
    # By piece, the price at its start (high) and at its end (low); by job, the time and the price
    # at which it is taken up later.
    high, low = np.zeros(len(starts)), np.zeros(len(starts))
    resumed: dict[int, tuple[float, float]] = {}

    for q in range(len(starts) - 1, -1, -1):
        j = int(jobs[q])
        if j in resumed:
            # The piece was preempted: the price at its end is that of its resumption and the rise
            # between.
            time, price = resumed[j]
            low[q] = price + (time - ends[q]) * slope[j]
        elif q + 1 < len(starts) and starts[q + 1] <= ends[q]:
            # The job completes, and the next piece follows at once.
            low[q] = high[q + 1]

        high[q] = low[q] + (ends[q] - starts[q]) * slope[j]
        resumed[j] = starts[q], high[q]

    # An end that only rounding puts behind an edge needs no further cell.
    cells = cells or max(1, math.ceil(float(ends[-1]) / width - 1e-9))
    width = width or float(ends[-1]) / cells
    edges = np.arange(cells + 1) * width
    # The integral of the price up to each edge: that of whole pieces, and of a part of the present
    # one, in which the price falls by the slope. Between pieces it is 0.
    whole_pieces = np.concatenate([[0.0], np.cumsum((high + low) / 2 * (ends - starts))])
    piece = np.clip(np.searchsorted(starts, edges, "right") - 1, 0, len(starts) - 1)
    part = np.clip(edges - starts[piece], 0, ends[piece] - starts[piece])
    integral = whole_pieces[piece] + high[piece] * part - slope[jobs[piece]] * part**2 / 2

    return np.maximum(np.diff(integral) / width, 0.0), width
