"""Service level objectives (SLOs): their names, and the limits of the requests of an instance."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import first_of, plain_numbers, real_column
from optsched.problem.errors import InputError

SLOS = {"slo_ttft": "ttft", "slo_tpot": "tpot", "slo_gap": "gap", "slo_latency": "latency"}
"""Every SLO by name, and the time of a request that it limits.

TTFT is the time to the first token, TPOT the mean time per output token after the first, the gap
the largest time between two output tokens in succession, and latency the time to the last token.
"""


def check_slo(name: str, value: float | None) -> None:
    """Check the limit of an SLO that holds for all requests; None is accepted."""
    if value is None:
        return

    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise InputError(f"{name}: found {value!r}; expected a time > 0")


SPARE = 1e-9
"""The part of a limit in seconds that a time may exceed it by."""


def with_spare(limit: Any, release: NDArray[np.float64], in_rounds: bool) -> NDArray[np.float64]:
    """Return limits as times are compared with them: a time is within if it is not larger.

    The judge, the bounds and the searches all compare by this. Times in seconds are differences of
    float64 clocks, so one that equals its limit may come out as a little more.

    `limit`: an SLO, shape (n,), infinite for no limit. `release`: since the first arrival, shape
    (n,). The spare is `SPARE`, and four units in the last place of the release, since a time is
    the difference of two sums that are as large.
    """
    limits = np.broadcast_to(np.asarray(limit, dtype=np.float64), release.shape)
    return limits if in_rounds else limits * (1 + SPARE) + 4 * np.spacing(release)


def slo_column(values: Any, name: str, max_limit: float) -> NDArray[np.float64]:
    """Return SLOs of requests as a read-only column, with infinity for None."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        absent = np.isposinf(values)
    elif hasattr(values, "__iter__") and not isinstance(values, (str, bytes)):
        values = list(values)
        absent = np.array([v is None or v == math.inf for v in values], dtype=bool)
    else:  # no column at all, which `real_column` refuses
        absent = np.zeros(0, dtype=bool)

    # The check takes finite numbers only, so a 1 stands for each absent limit meanwhile.
    if absent.any():
        values = [1.0 if no else v for v, no in zip(list(values), absent, strict=True)]

    limits = real_column(values, name, 0.0, max_limit).copy()
    if (i := first_of(limits == 0)) is not None:
        raise InputError(f"{name}: request {i}: found 0; expected a time > 0, or null for no limit")

    if absent.any():
        limits[absent] = math.inf

    limits.setflags(write=False)
    return limits


def plain_limits(column: NDArray[np.float64]) -> list[float | int | None]:
    """Return a column of limits as Python numbers, with None for no limit."""
    return [None if v == math.inf else v for v in plain_numbers(column)]
