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
    two others in either is predicted from these. The rows are two arrays, measured and predicted.
    """
    shape = rows.shape
    size, reached = rows.numbers("tokens", 1), rows.numbers("activated_experts", 1)
    ms = rows.times("time_us") / 1000
    if (max_reached := int(reached.max(initial=0))) != shape.experts:
        raise InputError(
            f"{rows.path}: activated_experts: found at most {max_reached}; expected "
            f"{shape.experts}, as {shape.name} has"
        )

    # By measured number of tokens: the experts reached, ascending, and their times.
    sizes = np.unique(size)
    lines = []
    for tokens_of_line in sizes:
        on_line = size == tokens_of_line
        order = np.argsort(reached[on_line])
        lines.append((reached[on_line][order], ms[on_line][order]))

    def time(k: int, experts: float) -> float:
        """Return the time of measured size k; beyond its rows it goes on as the next size does.

        Few tokens cannot reach all experts, so their rows end early.
        """
        axis, values = lines[k]
        on_line = float(np.interp(experts, axis, values))
        if experts <= axis[-1] or k + 1 == len(sizes):
            return on_line

        return on_line + time(k + 1, experts) - time(k + 1, axis[-1])

    # The measured size above each, of which the one before is below; beyond the ends the last two.
    means = shape.experts_reached(tokens)  # the experts that so many tokens reach in the mean
    above = np.clip(np.searchsorted(sizes, tokens), 1, len(sizes) - 1)
    part = (tokens - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    times = [
        (1 - p) * time(k - 1, mean) + p * time(k, mean)
        for k, p, mean in zip(above, part, means, strict=True)
    ]
    return np.array(times), _predict_inner(size, reached, ms)


def _predict_inner(size: Floats, reached: Floats, ms: Floats) -> tuple[Floats, Floats]:
    """Predict each row between two others of as many experts, or tokens, on the line of these.

    Return the measured times of such rows, and the predicted ones. `size`, `reached`: the tokens of
    each row, and the experts that they reach.
    """
    measured, predicted = [], []
    for along, fixed in ((size, reached), (reached, size)):
        for value in np.unique(fixed):
            order = np.flatnonzero(fixed == value)[np.argsort(along[fixed == value])]
            x, y = along[order], ms[order]
            if len(x) < 3:  # no row is between two others
                continue

            part = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
            measured.append(y[1:-1])
            predicted.append(y[:-2] + part * (y[2:] - y[:-2]))

    return np.concatenate(measured), np.concatenate(predicted)
