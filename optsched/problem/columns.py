"""Checks that turn numbers from files and users into read-only flat arrays."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.errors import InputError

MAX_TOKENS = 2**31 - 1
"""Largest prompt or output of one request, in tokens."""
INT64_MAX = 2**63 - 1

Item = str | Callable[[int], str]
"""How an error names an entry: a word to put before its index, or a function of the index."""


def read_only(column: NDArray[Any]) -> Any:
    """Return a view of an array through which it cannot be written."""
    view = column.view()
    view.setflags(write=False)
    return view


def plain_numbers(column: NDArray[Any]) -> list[int | float]:
    """Return a column as Python numbers; a float without a fraction becomes an ``int``."""
    if column.dtype.kind in "iu":
        return list(column.tolist())

    return [int(v) if v.is_integer() else v for v in column.tolist()]


def whole_number(value: Any, field_name: str, low: int, high: int) -> int:
    """Return ``value`` as an integer, checked."""
    return int(_check_number(value, field_name, low, high, whole=True))


def check_whole(value: object, name: str, low: int, high: int | None = None) -> int:
    """Return an option that must be an integer in a range, where no float stands for one."""
    # What is no integer counts as one below the range, and is refused like that.
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    number = int(value) if is_whole else low - 1  # type: ignore[call-overload]
    if number < low or (high is not None and number > high):
        limits = f">= {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"{name}: found {value!r}; expected an integer {limits}")

    return number


def check_fields(of: object, lows: Mapping[str, int]) -> None:
    """Check that fields of options are None, or integers that are at least these."""
    for name, low in lows.items():
        if (value := getattr(of, name)) is not None:
            check_whole(value, name, low)


def check_choice(value: object, name: str, known: Iterable[str]) -> None:
    """Check that an option is one of some names."""
    names = list(known)
    if value not in names:
        raise InputError(f"{name}: found {value!r}; expected one of {', '.join(names)}")


def whole_column(
    values: ArrayLike, field_name: str, low: int, high: int = MAX_TOKENS, *, item: Item = "request"
) -> NDArray[np.int64]:
    """Return values as a read-only column of integers. `item` names an entry in errors."""
    return _column(values, field_name, (low, high), item, whole=True)


def real_column(
    values: ArrayLike, field_name: str, low: float, high: float, *, item: Item = "request"
) -> NDArray[np.float64]:
    """Return ``values`` as a read-only column of floats, each checked."""
    return _column(values, field_name, (low, high), item, whole=False)


def same_length(n: int, columns: Mapping[str, Any]) -> None:
    """Refuse columns of requests, by name, that have not `n` values. None is accepted."""
    for name, column in columns.items():
        if column is not None and len(column) != n:
            raise InputError(
                f"requests.{name}: found {len(column)} values; expected {n}, as many as arrival has"
            )


def first_of(wrong: NDArray[np.bool_]) -> int | None:
    """Return the index of the first true entry, or None if there is none."""
    return int(np.argmax(wrong)) if wrong.any() else None


def _column(
    values: ArrayLike, field_name: str, limits: tuple[float, float], item: Item, *, whole: bool
) -> NDArray[Any]:
    """Check values as a whole where they are plain numbers, and else one by one.

    Errors call an entry `item` and its number, or what `item` returns for the number. `limits`: the
    smallest and the largest number allowed. `whole`: whether they have to be integers.
    """
    array = _flat(values, field_name, whole)
    low, high = limits
    dtype = np.int64 if whole else np.float64

    def check(i: int, value: Any) -> float:
        entry = f"{item} {i}" if isinstance(item, str) else item(i)
        return _check_number(value, f"{field_name}: {entry}", low, high, whole=whole)

    if array.dtype.kind not in ("iu" if whole else "iuf"):
        array = np.array([check(i, v) for i, v in enumerate(array.tolist())], dtype=dtype)
    elif not (fits := (array >= low) & (array <= high)).all():
        # The first that is out of range raises the error, which shows it as it was given.
        i = int(np.argmin(fits))
        check(i, values[i] if isinstance(values, (list, tuple)) else array[i].item())

    array = array.astype(dtype)
    array.setflags(write=False)
    return array


def _flat(values: ArrayLike, field_name: str, whole: bool) -> NDArray[Any]:
    """Return a flat array, of objects if some are not plain numbers, for an error to name them."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise InputError(f"{field_name}: found {values.ndim} dimensions; expected a flat list")

        return values

    if not hasattr(values, "__iter__") or isinstance(values, (str, bytes, Mapping)):
        raise InputError(f"{field_name}: found {values!r}; expected a list of numbers")

    column: list[Any] = list(values)  # type: ignore[arg-type]
    kinds = {type(v) for v in column}
    if kinds <= {int} or kinds == {float} or (not whole and kinds == {int, float}):
        with suppress(OverflowError):  # a huge integer stays an object, for an error to name
            return np.array(column, dtype=np.int64 if kinds <= {int} else np.float64)

    # One by one: numpy would spread nested lists over further dimensions.
    array = np.empty(len(column), dtype=object)
    for i, value in enumerate(column):
        array[i] = value

    return array


def _check_number(value: Any, place: str, low: float, high: float, *, whole: bool) -> float:
    """Return a number, or raise an error that says what is wrong with it first."""
    where = f"{place}: found {value!r}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}; expected {'an integer' if whole else 'a number'}")
    if value != value or value in (float("inf"), float("-inf")):
        raise InputError(f"{where}; expected a finite number")
    if whole and isinstance(value, float) and not value.is_integer():
        raise InputError(f"{where}; expected an integer")
    if not low <= value <= high:
        raise InputError(f"{where}; expected a number from {low} to {high}")

    return int(value) if whole else value
