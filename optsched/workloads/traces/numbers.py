"""Fields as numbers, durations and timestamps, whole columns at a time.

What is not plain digits goes through `Decimal` or numpy's dates, which give the same, only slower.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import MAX_TOKENS
from optsched.workloads.traces.base import PLACES, refuse
from optsched.workloads.traces.delimited import Fields

_ZERO = ord("0")


def whole_numbers(rows: Fields, field: str) -> NDArray[np.int64]:
    """Return a field as integers of at most `MAX_TOKENS`; ``3.0`` is one too.

    Raises
    ------
    InputError
        Anything else, with line, column and value.
    """
    value, plain = _digits(rows, field, 0)
    for i in np.flatnonzero(~plain).tolist():
        value[i] = _whole(rows, field, i)
    if value.size and value.max() > MAX_TOKENS:
        i = int(np.argmax(value > MAX_TOKENS))
        right = f"is out of range; at most {MAX_TOKENS} is right"
        raise refuse(rows.path, rows.line[i], rows.names[field], int(value[i]), right)
    return value


_WHOLE = re.compile(r"[+-]?\d{1,18}(\.0*)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d{1,30}(\.\d{0,60})?|\.\d{1,60})([eE][+-]?\d{1,3})?", re.ASCII)


def _whole(rows: Fields, field: str, i: int) -> int:
    text = rows.text(field, i)
    if _WHOLE.fullmatch(text) is None:
        right = f"is not an integer of at most {MAX_TOKENS}"
        raise refuse(rows.path, rows.line[i], rows.names[field], text, right)
    return int(text.partition(".")[0])


def nanoseconds(rows: Fields, field: str, unit: str) -> NDArray[np.int64]:
    """Return times in nanoseconds from numbers in a unit of `PLACES`, halves rounded up.

    Raises
    ------
    InputError
        No finite number, or one beyond 64-bit nanoseconds; with line, column and value.
    """
    places = PLACES[unit]
    value, plain = _digits(rows, field, places)
    for i in np.flatnonzero(~plain).tolist():
        text = rows.text(field, i)
        exact = exact_ns(text, unit)
        if exact is None:
            right = "is not a number of " + {"s": "seconds"}.get(unit, unit)
            if _NUMBER.fullmatch(text):
                right = "is out of range; at most 146 years are right"
            elif STAMP.fullmatch(text):
                right += "; the unit 'datetime' reads dates and times"
            raise refuse(rows.path, rows.line[i], rows.names[field], text, right)
        value[i] = exact
    return value


def exact_ns(text: str, unit: str) -> int | None:
    """Return the nanoseconds that a number in ``unit`` stands for, None if it is none."""
    if _NUMBER.fullmatch(text) is None:
        return None
    exact = Decimal(text).scaleb(PLACES[unit])
    return int(exact.quantize(Decimal(1), ROUND_HALF_UP)) if abs(exact) < 2**62 else None


def _digits(rows: Fields, field: str, places: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return plain decimal numbers times ``10 ** places``, and which rows hold one.

    With no places only digits are plain; else digits with at most one point among them. Digits
    beyond the places round halves up.
    """
    data, start = rows.data, rows.start[field]
    length = rows.end[field] - start
    n = len(start)
    value = np.zeros(n, dtype=np.int64)
    fraction = np.full(n, -1, dtype=np.int64)  # digits after the point; -1 before it
    half = np.zeros(n, dtype=np.int64)
    plain = (length > 0) & (length <= 24)
    whole = np.zeros(n, dtype=np.int64)  # digits before the point
    last = len(data) - 1
    for k in range(int(length[plain].max(initial=0))):
        inside = plain & (k < length)
        char = data[np.minimum(start + k, last)]
        digit = char - _ZERO  # wraps above 9 for anything before "0"
        is_digit = inside & (digit <= 9)
        if places:
            point = inside & (char == ord(".")) & (fraction < 0)
            fraction[point] = 0
            plain &= ~inside | is_digit | point
            full = fraction >= places
            half = np.where(is_digit & (fraction == places), digit >= 5, half)
            fraction = np.where(is_digit & (fraction >= 0), fraction + 1, fraction)
            whole += is_digit & (fraction < 0)
            is_digit = is_digit & ~full
        else:
            plain &= ~inside | is_digit
            whole += is_digit
        value = np.where(is_digit, value * 10 + digit, value)
    small = (whole <= 18 - places) | (
        (whole == 19 - places) & (data[np.minimum(start, last)] <= ord("3"))
    )
    plain &= (whole > 0) & small  # below 4e18, which 64 bits hold
    missing = np.clip(places - np.maximum(fraction, 0), 0, places)
    value = np.where(plain, value, 0) * 10**missing + half
    return value, plain


STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|[+-]00:?00|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)
_STAMP_RIGHT = "is not a date and time; 2023-11-16 18:15:46.6805900 is the form"
_YEARS = (1900, 2190)  # differences of two such times fit into 64-bit nanoseconds
_SECONDS = 19  # characters of a date and time to the second
_DIGITS_AT = np.array([0, 1, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18])


def timestamps(rows: Fields, field: str) -> NDArray[np.int64]:
    """Return dates and times (UTC unless they say otherwise) in nanoseconds since 1970.

    Raises
    ------
    InputError
        Another form, no such day, before 1900 or after 2189; with line, column and value.
    """
    data, start = rows.data, rows.start[field]
    length = rows.end[field] - start
    plain = (length >= _SECONDS) & (length <= 35)
    value = np.zeros(len(start), dtype=np.int64)
    if plain.any():
        at, size = start[plain], length[plain]
        value[plain], good = _plain_stamps(data, at, size)
        plain[plain] = good
    for i in np.flatnonzero(~plain).tolist():
        value[i] = _stamp(rows, field, i)
    return value


def _plain_stamps(
    data: NDArray[np.uint8], at: NDArray[np.int64], size: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the nanoseconds of timestamps in UTC, and which of them are of that kind."""
    last = len(data) - 1
    digit = (data[at[:, None] + _DIGITS_AT] - _ZERO).astype(np.int64)
    good = (digit <= 9).all(axis=1)
    for place, marks in ((4, b"-"), (7, b"-"), (10, b" T"), (13, b":"), (16, b":")):
        char = data[at + place]
        good &= (char == marks[0]) | (char == marks[-1])
    year = digit[:, 0] * 1000 + digit[:, 1] * 100 + digit[:, 2] * 10 + digit[:, 3]
    month, day, hour, minute, second = (digit[:, k] * 10 + digit[:, k + 1] for k in range(4, 14, 2))
    good &= (year >= _YEARS[0]) & (year < _YEARS[1]) & (month >= 1) & (month <= 12) & (day >= 1)
    good &= (hour < 24) & (minute < 60) & (second < 60)
    first = np.where(good, (year - 1970) * 12 + month - 1, 0).astype("datetime64[M]")
    begin = first.astype("datetime64[D]")
    good &= begin + (day - 1) < (first + 1).astype("datetime64[D]")
    days = begin.astype(np.int64) + day - 1
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second

    point = (size > _SECONDS) & (data[np.minimum(at + _SECONDS, last)] == ord("."))
    fraction = np.zeros(len(at), dtype=np.int64)
    used = np.zeros(len(at), dtype=np.int64)  # digits of the fraction
    running = point.copy()
    for k in range(1, 10):
        here = data[np.minimum(at + _SECONDS + k, last)] - _ZERO
        running &= (_SECONDS + k < size) & (here <= 9)
        fraction = np.where(running, fraction * 10 + here, fraction)
        used += running
    good &= ~point | (used > 0)
    fraction *= 10 ** (9 - used)
    tail = at + _SECONDS + point + used
    left = at + size - tail
    zone = (left == 1) & (data[np.minimum(tail, last)] == ord("Z"))
    offset = left == 6
    for k, right in enumerate(b"+00:00"):
        offset &= data[np.minimum(tail + k, last)] == right
    good &= (left == 0) | zone | offset
    return np.where(good, seconds, 0) * 10**9 + fraction, good


def _stamp(rows: Fields, field: str, i: int) -> int:
    text = rows.text(field, i)
    match = STAMP.fullmatch(text)
    error = refuse(rows.path, rows.line[i], rows.names[field], text, _STAMP_RIGHT)
    if match is None:
        raise error
    plain, sign, hours, minutes = match.groups()
    try:
        stamp = np.datetime64(plain, "ns")
    except ValueError:
        raise error from None
    if not _YEARS[0] <= int(plain[:4]) < _YEARS[1]:
        raise error
    zone = 0 if sign is None else (1 if sign == "+" else -1) * (int(hours) * 60 + int(minutes))
    return int(stamp.astype(np.int64)) - zone * 60 * 10**9


def seconds(rows: Fields, field: str, unit: str) -> NDArray[np.float64]:
    """Return durations in seconds, from numbers in a unit of `PLACES`; see `nanoseconds`."""
    return np.asarray(nanoseconds(rows, field, unit) / 1e9, dtype=np.float64)
