"""Checks of columns: numbers that come from files and users, as read-only flat arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.errors import InputError

MAX_TOKENS = 2**31 - 1
"""Largest prompt or output of one request, in tokens."""
INT64_MAX = 2**63 - 1


def plain_numbers(column: NDArray[Any]) -> list[int | float]:
    """Return a column as Python numbers, integral ones as ``int``."""
    if column.dtype.kind in "iu":
        return list(column.tolist())
    return [int(v) if v.is_integer() else v for v in column.tolist()]


def whole_number(value: Any, field_name: str, low: int, high: int) -> int:
    """Return ``value`` as an integer, or say that it is none in range; see `whole_column`."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise InputError(f"{field_name}: {value!r} is not an integer")
    if isinstance(number, float) and not number.is_integer():
        raise InputError(f"{field_name}: {value!r} is not an integer")
    if not low <= number <= high:
        raise InputError(f"{field_name}: {value!r} is out of range; {low} to {high} is right")
    return int(number)


def whole_column(
    values: ArrayLike, field_name: str, low: int, high: int = MAX_TOKENS, *, item: str = "request"
) -> NDArray[np.int64]:
    """Return ``values`` as a read-only int64 column, or say which one is no integer in range.

    Parameters
    ----------
    values : array_like, shape (n,)
    field_name : str
        How the error names the column.
    low, high : int
        The smallest and largest value allowed.
    item : str
        How the error names one entry of the column.

    Raises
    ------
    InputError
        Not a flat list; a boolean, string, fraction, NaN or infinity; out of range.
    """
    array = _flat(values, field_name)
    if array.dtype.kind not in "iu":
        checked = [
            _request_number(v, f"{field_name}: {item} {i}", low, high, whole=True)
            for i, v in enumerate(array.tolist())
        ]
        array = np.array(checked, dtype=np.int64)
    elif array.size and not (array.min() >= low and array.max() <= high):
        i = int(np.argmax((array < low) | (array > high)))
        _request_number(array[i].item(), f"{field_name}: {item} {i}", low, high, whole=True)
    return _read_only(array.astype(np.int64))


def real_column(
    values: ArrayLike, field_name: str, low: float, high: float, *, item: str = "request"
) -> NDArray[np.float64]:
    """Return ``values`` as a read-only float64 column; see `whole_column`."""
    array = _flat(values, field_name)
    if array.dtype.kind not in "iuf":
        checked = [
            _request_number(v, f"{field_name}: {item} {i}", low, high, whole=False)
            for i, v in enumerate(array.tolist())
        ]
        array = np.array(checked, dtype=np.float64)
    elif array.size:
        bad = ~((array >= low) & (array <= high))
        if bad.any():
            i = int(np.argmax(bad))
            _request_number(array[i].item(), f"{field_name}: {item} {i}", low, high, whole=False)
    return _read_only(array.astype(np.float64))


def _flat(values: ArrayLike, field_name: str) -> NDArray[Any]:
    column: Any = values
    if isinstance(column, np.ndarray):
        array = column
    else:
        if not isinstance(column, (list, tuple, range)):
            if not hasattr(column, "__iter__") or isinstance(column, (str, bytes, Mapping)):
                raise InputError(f"{field_name}: {values!r} is not a list of numbers")
            column = list(column)
        kinds = {type(v) for v in column}
        if kinds <= {int}:
            try:
                array = np.array(column, dtype=np.int64)
            except OverflowError:
                array = np.array(column, dtype=object)
        elif kinds == {float}:
            array = np.array(column, dtype=np.float64)
        else:
            # One by one: numpy would spread nested lists over further dimensions.
            array = np.empty(len(column), dtype=object)
            for i, value in enumerate(column):
                array[i] = value
    if array.ndim != 1:
        raise InputError(f"{field_name}: has {array.ndim} dimensions; a flat list is right")
    return array


def _request_number(value: Any, place: str, low: float, high: float, *, whole: bool) -> float:
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


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    if array.flags.writeable:
        array = array.copy() if array.base is not None else array
        array.setflags(write=False)
    return array
