"""Rows whose coefficients are too large for the tolerances of HiGHS: an easier model, and cuts.

**Sizes.** HiGHS scales rows, and takes a row as satisfied if it is violated by at most 1e-6 of its
largest coefficient or less. Let a row have integer columns and integer coefficients of at most
`LARGEST` = 100,000. Integer values that violate it do so by 1 at least, which is 1e-5 of the
largest coefficient and ten times the tolerance. Values that satisfy it do so exactly, as floats
hold all integers up to 2^53. So HiGHS tells the two apart. With KV of 10^6 tokens it does not: a
batch that is one token too large is within the tolerance.

**The easier model.** Let sum a_j x_j <= b be a larger row, with x_j >= 0 integers, and let
g = ceil(max |a_j| / `LARGEST`). Then sum floor(a_j / g) x_j <= sum a_j x_j / g <= b / g. The left
side is an integer, so it is at most floor(b / g). The row of the floors has coefficients of at most
`LARGEST` and excludes no solution. So a bound of the easier model is a bound of the model.

**Cuts.** A solution of the easier model may violate the large row. That is found in integers. If
all columns of the row are binary, let C be the largest chosen columns of it, just enough to exceed
b, and k their number. Any k columns that are as large as the members of C exceed b too:

- If every member has a_j >= t = floor(b / k) + 1, any k columns with a_j >= t sum to more than b.
  So at most k - 1 of them are chosen, in this row and in every other large row with this b.
- Else at most k - 1 are chosen of C and the columns that are at least as large as all of C.

A cut excludes the solution at hand and none of the model. So the solves end with a solution of the
model, which is optimal if it was in the easier one, or with the time.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.solvers.base import LinearModel

LARGEST = 100_000
"""The largest coefficient of a row of integers for which HiGHS's tolerances are safe."""

Ints = NDArray[np.int64]


class LargeRow(NamedTuple):
    """A row sum(value * column) <= upper of integers."""

    column: Ints
    value: Ints
    upper: int


class Cut(NamedTuple):
    """A row that lets at most ``upper`` of some binary columns be chosen."""

    column: Ints
    upper: int


def large_rows(model: LinearModel) -> dict[int, LargeRow]:
    """Return the rows by number that are too large for HiGHS and have an easier form."""
    if np.abs(model.value).max(initial=0.0) <= LARGEST:
        return {}

    largest = np.zeros(model.rows)
    np.maximum.at(largest, model.index, np.abs(model.value))
    large = (largest > LARGEST) & np.isneginf(model.row_lower) & np.isfinite(model.row_upper)
    if not large.any():
        return {}

    column = np.repeat(np.arange(model.columns), np.diff(model.start))
    suits = (model.integrality == 1) & (model.lower >= 0)
    odd = ~suits[column] | (model.value != np.rint(model.value))
    large[model.index[odd]] = False
    entries = np.flatnonzero(large[model.index])
    entries = entries[np.argsort(model.index[entries], kind="stable")]
    numbers, begin = np.unique(model.index[entries], return_index=True)

    return {
        row: LargeRow(column[at], model.value[at].astype(np.int64), int(model.row_upper[row]))
        for row, at in zip(numbers.tolist(), np.split(entries, begin[1:]), strict=True)
    }


def easier(model: LinearModel, rows: dict[int, LargeRow]) -> LinearModel:
    """Return the model with floors in place of the coefficients of large rows."""
    divisor = np.ones(model.rows, dtype=np.int64)
    for number, row in rows.items():
        divisor[number] = -(-int(np.abs(row.value).max()) // LARGEST)

    of_entry, upper = divisor[model.index], model.row_upper.copy()
    for number in rows:
        upper[number] = int(upper[number]) // int(divisor[number])

    value = np.where(of_entry > 1, np.floor_divide(model.value, of_entry), model.value)
    return replace(model, value=value, row_upper=upper)


def cuts_of(
    model: LinearModel, rows: dict[int, LargeRow], values: NDArray[np.float64]
) -> list[Cut] | None:
    """Return cuts that exclude a solution, if any; None if a row that it breaks is not binary."""
    chosen, cuts = np.rint(values).astype(np.int64), dict[tuple[int, ...], Cut]()
    for number, row in rows.items():
        if int((row.value * chosen[row.column]).sum()) <= row.upper:
            continue
        if (model.upper[row.column] > 1).any() or (row.value < 0).any():
            return None

        used = np.flatnonzero(chosen[row.column])
        used = used[np.argsort(-row.value[used], kind="stable")]
        count = int(np.searchsorted(np.cumsum(row.value[used]), row.upper, side="right")) + 1
        cover = used[:count]
        threshold = row.upper // count + 1

        if row.value[cover].min() < threshold:
            both = np.union1d(cover, np.flatnonzero(row.value >= row.value[cover].max()))
            cuts[number, count] = Cut(row.column[both], count - 1)
            continue

        for other, same in rows.items():
            members = same.column[same.value >= threshold]
            if same.upper == row.upper and len(members) >= count:
                cuts[other, count] = Cut(members, count - 1)

    return list(cuts.values())


def with_cuts(model: LinearModel, cuts: list[Cut]) -> LinearModel:
    """Return a model with further rows."""
    column = np.concatenate(
        [np.repeat(np.arange(model.columns), np.diff(model.start)), *(c.column for c in cuts)]
    )
    added = np.repeat(np.arange(len(cuts)), [len(cut.column) for cut in cuts]) + model.rows
    order = np.argsort(column, kind="stable")
    start = np.zeros(model.columns + 1, dtype=model.start.dtype)
    np.cumsum(np.bincount(column, minlength=model.columns), out=start[1:])

    return replace(
        model,
        start=start,
        index=np.concatenate([model.index, added.astype(model.index.dtype)])[order],
        value=np.concatenate([model.value, np.ones(len(added))])[order],
        row_lower=np.concatenate([model.row_lower, np.full(len(cuts), -np.inf)]),
        row_upper=np.concatenate([model.row_upper, [float(cut.upper) for cut in cuts]]),
    )
