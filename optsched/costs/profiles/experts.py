"""The time of a layer's experts by tokens, from a table by tokens and by experts that they reach.

How many experts a batch reaches depends on what it says, so a time by tokens needs an assumption
(`Architecture.routing`). Real routing is more or less skewed, and a batch that reaches fewer
experts takes less: what is proved under such a model holds for this routing.
"""

import numpy as np

from optsched.costs.profiles.tables import Measurements
from optsched.costs.table import Floats
from optsched.problem.errors import InputError

COLUMNS = ("ep", "tokens", "activated_experts", "time_us")


def experts_of(rows: Measurements, tokens: Floats) -> tuple[Floats, tuple[Floats, Floats]]:
    """Return milliseconds at some numbers of tokens, and rows beside what the others say of them.

    Times are linear between measured numbers of experts, and then of tokens. A row that is between
    two others in either is predicted from these.
    """
    shape = rows.shape
    size, reached = rows.numbers("tokens", 1), rows.numbers("activated_experts", 1)
    ms = rows.times("time_us") / 1000
    if (found := int(reached.max(initial=0))) != shape.experts:
        raise InputError(
            f"{rows.path}: activated_experts: found at most {found}; expected {shape.experts}, as "
            f"{shape.name} has"
        )

    counts = np.unique(size)
    lines = []
    for count in counts:
        order = np.argsort(reached[size == count])
        lines.append((reached[size == count][order], ms[size == count][order]))

    def at(k: int, experts: float) -> float:
        """Return the time of a measured number of tokens; beyond its rows as the next goes on."""
        axis, values = lines[k]
        own = float(np.interp(experts, axis, values))
        if experts <= axis[-1] or k + 1 == len(counts):
            return own

        return own + at(k + 1, experts) - at(k + 1, axis[-1])

    means = shape.experts_reached(tokens)
    above = np.clip(np.searchsorted(counts, tokens), 1, len(counts) - 1)
    part = (tokens - counts[above - 1]) / (counts[above] - counts[above - 1])
    found_ms = [
        (1 - p) * at(k - 1, mean) + p * at(k, mean)
        for k, p, mean in zip(above, part, means, strict=True)
    ]
    return np.array(found_ms), _predicted(size, reached, ms)


def _predicted(size: Floats, reached: Floats, ms: Floats) -> tuple[Floats, Floats]:
    """Return the times of rows between two others of as many experts, or tokens, and the lines."""
    measured, predicted = [], []
    for along, fixed in ((size, reached), (reached, size)):
        for value in np.unique(fixed):
            order = np.flatnonzero(fixed == value)[np.argsort(along[fixed == value])]
            x, y = along[order], ms[order]
            if len(x) < 3:
                continue

            part = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
            measured.append(y[1:-1])
            predicted.append(y[:-2] + part * (y[2:] - y[:-2]))

    return np.concatenate(measured), np.concatenate(predicted)
