"""Checks of columns: numbers that come from files and users, as read-only flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.errors import InputError

MAX_TOKENS = 2**31 - 1
"""Largest prompt or output of one request, in tokens."""
INT64_MAX = 2**63 - 1

Item = str | Callable[[int], str]
"""How an error names an entry of a column: a word before its index, or a function of the index."""


def plain_numbers(column: NDArray[Any]) -> list[int | float]:
    """Return a column as Python numbers, integral ones as ``int``."""
    if column.dtype.kind in "iu":
        return list(column.tolist())
    return [int(v) if v.is_integer() else v for v in column.tolist()]


def whole_number(value: Any, field_name: str, low: int, high: int) -> int:
    """Return ``value`` as an integer, or say that it is none in range; see `whole_column`."""
    return int(_checked(value, field_name, low, high, whole=True))


def whole_column(
    values: ArrayLike, field_name: str, low: int, high: int = MAX_TOKENS, *, item: Item = "request"
) -> NDArray[np.int64]:
    """Return ``values`` as a read-only int64 column, or say which one is no integer in range.

    Parameters
    ----------
    values : array_like, shape (n,)
    field_name : str
        How the error names the column.
    low, high : int
        The smallest and largest value allowed.
    item : str or callable
        How the error names one entry of the column: a word before its index, or a function
        from the index to words.

    Raises
    ------
    InputError
        Not a flat list; a boolean, string, fraction, NaN or infinity; out of range.
    """
    return _column(values, field_name, (low, high), item, whole=True)


def real_column(
    values: ArrayLike, field_name: str, low: float, high: float, *, item: Item = "request"
) -> NDArray[np.float64]:
    """Return ``values`` as a read-only float64 column; see `whole_column`."""
    return _column(values, field_name, (low, high), item, whole=False)


def _column(
    values: ArrayLike, field_name: str, limits: tuple[float, float], item: Item, *, whole: bool
) -> NDArray[Any]:
    array = _flat(values, field_name, whole)
    low, high = limits
    dtype = np.int64 if whole else np.float64

    def check(i: int, value: Any) -> float:
        entry = f"{item} {i}" if isinstance(item, str) else item(i)
        return _checked(value, f"{field_name}: {entry}", low, high, whole=whole)

    if array.dtype.kind not in ("iu" if whole else "iuf"):
        array = np.array([check(i, v) for i, v in enumerate(array.tolist())], dtype=dtype)
    elif not (fits := (array >= low) & (array <= high)).all():
        i = int(np.argmin(fits))
        check(i, values[i] if isinstance(values, (list, tuple)) else array[i].item())
    array = array.astype(dtype)
    array.setflags(write=False)
    return array


def _flat(values: ArrayLike, field_name: str, whole: bool) -> NDArray[Any]:
    """Return a list as a flat array; what is no plain number stays an object, to be named."""
    column: Any = values
    if not isinstance(column, np.ndarray):
        if not hasattr(column, "__iter__") or isinstance(column, (str, bytes, Mapping)):
            raise InputError(f"{field_name}: {values!r} is not a list of numbers")
        column = list(column)
        kinds = {type(v) for v in column}
        if kinds <= {int} or kinds == {float} or (not whole and kinds == {int, float}):
            with suppress(OverflowError):  # an integer beyond all is named like any other
                return np.array(column, dtype=np.int64 if kinds <= {int} else np.float64)
        # One by one: numpy would spread nested lists over further dimensions.
        array = np.empty(len(column), dtype=object)
        for i, value in enumerate(column):
            array[i] = value
        return array
    if column.ndim != 1:
        raise InputError(f"{field_name}: has {column.ndim} dimensions; a flat list is right")
    return column


def _checked(value: Any, place: str, low: float, high: float, *, whole: bool) -> float:
    where = f"{place}: {value!r}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where} is not {'an integer' if whole else 'a number'}")
    if value != value or value in (float("inf"), float("-inf")):
        raise InputError(f"{where} is not a finite number")
    if whole and isinstance(value, float) and not value.is_integer():
        raise InputError(f"{where} is not an integer")
    if not low <= value <= high:
        raise InputError(f"{where} is out of range; {low} to {high} is right")
    return int(value) if whole else value
