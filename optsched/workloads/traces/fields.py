"""Fields of a trace as numbers, durations and timestamps, read a whole column at a time.

Values in an unusual notation are read one by one, which gives the same result more slowly.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Source

PLACES = {"s": 9, "ms": 6, "us": 3, "ns": 0}
"""Decimal places of a nanosecond in each unit of time."""

DURATIONS = {"ttft": "first_token_at", "latency": "finished_at"}
"""Fields that are durations from the arrival, and those that are the same as points in time."""

TIMES = ("arrival", *DURATIONS, *DURATIONS.values())
"""Fields that have a unit."""

UNIT_WORDS = {
    word: unit
    for unit, words in {
        "s": "s sec secs second seconds",
        "ms": "ms msec milli millis millisecond milliseconds",
        "us": "us usec micro micros microsecond microseconds \u03bcs",
        "ns": "ns nsec nano nanos nanosecond nanoseconds",
    }.items()
    for word in words.split()
}
"""Units by the words for them, in small letters."""

_NUMBER = re.compile(r"[+-]?(\d{1,30}(\.\d{0,60})?|\.\d{1,60})([eE][+-]?\d{1,3})?", re.ASCII)
_WITH_UNIT = re.compile(r"([\d.eE+-]+)\s*([^\W\d_]+)")
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?"
    r"(?: ?(?:Z|UTC|([+-])(\d\d)(?::?(\d\d))?))?",
    re.ASCII,
)
_YEARS = ("1900", "2190")  # differences of times between them fit into 64-bit nanoseconds


@dataclass(frozen=True, eq=False)
class Fields:
    """Consecutive rows of a file, with the fields that a reader wants as columns.

    Parameters
    ----------
    source : Source
        The file. Rows with a value that cannot be read are told to its findings.
    line : ndarray of int64, shape (n,)
        Line of the file that each row comes from, counted from 1.
    names : mapping of str to str
        Name in the file of each field that was found.
    columns : mapping of str to ndarray of bytes or int64, shape (n,)
        UTF-8 texts or integers of each field that was found.
    missing : mapping of (str, int) to InputError
        Errors by field and row, for values that are not there. They count once the value is asked
        for, so that a failed request may lack them.
    unreadable : ndarray of bool, shape (n,)
        Rows with a value that was asked for and cannot be read. It then reads as 0.
    """

    source: Source
    line: NDArray[np.int64]
    names: Mapping[str, str]
    columns: Mapping[str, NDArray[Any]]
    missing: Mapping[tuple[str, int], InputError] = field(default_factory=dict)
    unreadable: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unreadable", np.zeros(len(self.line), dtype=bool))

    @classmethod
    def from_texts(
        cls,
        source: Source,
        line: Sequence[int],
        names: Mapping[str, str],
        columns: Mapping[str, Sequence[str]],
        missing: Mapping[tuple[str, int], InputError] | None = None,
    ) -> Fields:
        """Return rows whose fields are texts.

        Parameters
        ----------
        source : Source
        line : sequence of int
        names : mapping of str to str
            See `Fields`.
        columns : mapping of str to sequence of str
            Texts of each field.
        missing
            See `Fields`.

        Returns
        -------
        Fields
        """
        encoded = {  # zero bytes are written as \0, since numpy drops them at the end of a text
            field: np.array(
                [
                    text.strip().replace("\0", r"\0").encode(errors="backslashreplace")
                    for text in texts
                ],
                dtype=np.bytes_,
            )
            for field, texts in columns.items()
        }
        return cls(source, np.asarray(line, dtype=np.int64), names, encoded, missing or {})

    def whole_numbers(self, field: str, skip: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Return a field as integers.

        Parameters
        ----------
        field : str
        skip : ndarray of bool, shape (n,), optional
            Rows that are not read and get 0, such as failed requests that have no such value.

        Returns
        -------
        ndarray of int64, shape (n,)

        Raises
        ------
        InputError
            A value is not an integer of at most `MAX_TOKENS` (``3e0`` is one). The error names
            line, column and value.
        """
        right = f"an integer of at most {MAX_TOKENS}"
        value = column = self._read(field, skip)
        if column.dtype.kind == "S":
            plain = np.char.isdigit(column) & (np.char.str_len(column) <= 18)
            value = np.where(plain, column, b"0").astype(np.int64)
            for i in np.flatnonzero(~plain).tolist():
                text = self._text(field, i)
                exact = Decimal(text) if _NUMBER.fullmatch(text) else Decimal("NaN")
                if exact == exact.to_integral_value() and abs(exact) <= MAX_TOKENS:
                    value[i] = int(exact)
                else:
                    self.refuse(field, i, right)
        for i in np.flatnonzero(value > MAX_TOKENS).tolist():
            self.refuse(field, i, right, int(value[i]))
        return np.where(value > MAX_TOKENS, 0, value)

    def nanoseconds(
        self, field: str, unit: str, skip: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Return a field of times in nanoseconds, with halves rounded up.

        Parameters
        ----------
        field : str
        unit : str
            Unit of the numbers in the file, one of `PLACES`.
        skip : ndarray of bool, shape (n,), optional
            See `whole_numbers`.

        Returns
        -------
        ndarray of int64, shape (n,)

        Raises
        ------
        InputError
            A value is not a finite number, or is beyond 64-bit nanoseconds. The error names line,
            column and value.
        """
        column = self._read(field, skip)
        value, plain = _decimals(column, PLACES[unit])
        for i in np.flatnonzero(~plain).tolist():
            text = self._text(field, i)
            exact = exact_ns(text, unit)
            if exact is None:
                self.refuse(field, i, _right_time(text, field, unit))
            else:
                value[i] = exact
        return value

    def seconds(
        self, field: str, unit: str, skip: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return a field of durations in seconds.

        Parameters
        ----------
        field, unit, skip
            See `nanoseconds`.

        Returns
        -------
        ndarray of float64, shape (n,)

        Raises
        ------
        InputError
            See `nanoseconds`.
        """
        return np.asarray(self.nanoseconds(field, unit, skip) / 1e9, dtype=np.float64)

    def points(
        self, field: str, unit: str, skip: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Return a field of points in time in nanoseconds, as numbers or as dates."""
        if unit == "datetime":
            return self.timestamps(field, skip)
        return self.nanoseconds(field, unit, skip)

    def timestamps(self, field: str, skip: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Return a field of dates and times in nanoseconds since 1970.

        Parameters
        ----------
        field : str
            Times without a zone are UTC.
        skip : ndarray of bool, shape (n,), optional
            See `whole_numbers`.

        Returns
        -------
        ndarray of int64, shape (n,)

        Raises
        ------
        InputError
            A value has another form, names a day that does not exist, or is before 1900 or after
            2189. The error names line, column and value.
        """
        value = np.zeros(len(self.line), dtype=np.int64)
        rows = range(len(value)) if skip is None else np.flatnonzero(~skip).tolist()
        for i in rows:
            text = self._text(field, i)
            exact = exact_stamp(text)
            if exact is None:
                right = "a date and time like 2023-11-16 18:15:46.6805900"
                hint = "; the units s, ms, us and ns read numbers"
                self.refuse(field, i, right + (hint if _NUMBER.fullmatch(text) else ""))
            else:
                value[i] = exact
        return value

    def _read(self, field: str, skip: NDArray[np.bool_] | None) -> NDArray[Any]:
        column = self.columns[field]
        if skip is None:
            return column
        return np.where(skip, b"0" if column.dtype.kind == "S" else 0, column)

    def _text(self, field: str, row: int) -> str:
        return str(self.columns[field][row].decode()).strip()

    def refuse(self, field: str, row: int, right: str, found: object = None) -> None:
        """Tell the findings that a row cannot be read: what was found and what is right."""
        if self.unreadable[row]:
            return
        shown = repr(self._text(field, row) if found is None else found)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        line = int(self.line[row])
        place = f"{self.source.path}: line {line}: {self.names[field]}"
        error = InputError(f"{place}: found {shown}; expected {right}")
        error = self.missing.get((field, row), error)
        self.source.findings.skip(line, error)
        self.unreadable[row] = True


def _right_time(text: str, field: str, unit: str) -> str:
    """Return what is expected where a text is no time, and which option reads it."""
    if _NUMBER.fullmatch(text):
        return "at most 146 years; is the unit another one (unit, --unit)?"
    right = "a number of " + {"s": "seconds"}.get(unit, unit)
    if not _STAMP.fullmatch(text):
        return right
    if field in DURATIONS:
        point = DURATIONS[field]
        return f"{right}; a column of points in time is named by {point} (--column {point}=NAME)"
    return right + "; the unit 'datetime' reads dates and times"


def exact_ns(text: str, unit: str) -> int | None:
    """Return the nanoseconds of a text that is a number of some unit.

    Parameters
    ----------
    text : str
        A unit after the number counts instead.
    unit : str
        One of `PLACES`.

    Returns
    -------
    int or None
        Halves are rounded up. None if the text is not a number, or is beyond 146 years.
    """
    if (own := _WITH_UNIT.fullmatch(text)) is not None:
        text, unit = own[1], UNIT_WORDS.get(own[2].casefold(), "")
    if not unit or _NUMBER.fullmatch(text) is None:
        return None
    exact = Decimal(text).scaleb(PLACES[unit])
    return int(exact.quantize(Decimal(1), ROUND_HALF_UP)) if abs(exact) < 2**62 else None


def exact_stamp(text: str) -> int | None:
    """Return the nanoseconds since 1970 of a text that is a date and time.

    Parameters
    ----------
    text : str

    Returns
    -------
    int or None
        None if the text is not a date and time from 1900 to 2189.
    """
    match = _STAMP.fullmatch(text)
    if match is None or not _YEARS[0] <= text[:4] < _YEARS[1]:
        return None
    day, clock, fraction, sign, hours, minutes = match.groups()
    midnight = _midnight(day)
    if midnight is None or clock > "23:59:59" or clock[3] > "5" or clock[6] > "5":
        return None
    seconds = int(clock[:2]) * 3600 + int(clock[3:5]) * 60 + int(clock[6:])
    zone = 0 if sign is None else int(sign + "1") * (int(hours) * 60 + int(minutes or 0))
    return (midnight + seconds - zone * 60) * 10**9 + int((fraction or "").ljust(9, "0"))


@functools.lru_cache(maxsize=1024)
def _midnight(day: str) -> int | None:
    """Return the seconds from 1970 to the beginning of a day, None for one that does not exist."""
    try:
        return (date.fromisoformat(day) - date(1970, 1, 1)).days * 86_400
    except ValueError:
        return None


def _decimals(
    texts: NDArray[np.bytes_], places: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return plain decimal numbers times ``10**places``, and which texts hold one.

    A plain number is made of digits, with at most one point after the first digit. Halves are
    rounded up.
    """
    whole, _, fraction = np.moveaxis(np.char.partition(texts, b"."), -1, 0)
    size = np.char.str_len(whole)
    plain = np.char.isdigit(whole) & (np.char.isdigit(fraction) | (fraction == b""))
    # Values stay below 4e18 nanoseconds, which 64 bits hold.
    plain &= (size < 19 - places) | ((size == 19 - places) & (whole < b"4"))
    value = np.where(plain, whole, b"0").astype(np.int64) * 10**places
    # One digit after the last place decides which way to round.
    digits = np.char.ljust(np.where(plain, fraction, b"0"), places + 1, b"0")
    return value + (digits.astype(f"S{places + 1}").astype(np.int64) + 5) // 10, plain
