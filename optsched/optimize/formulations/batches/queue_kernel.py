"""What infermax's compiled searches share: a hash table of rows, and a heap of what is open.

Import it lazily: it loads numba.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

Ints = NDArray[Any]

RUNNING, SOLVED, GROW = 0, 1, 2
"""What an `expand` returns: its slice is used up; nothing open is below the incumbent; or the
arrays are too small."""
ROWS, ENTRIES, BEST, GOAL, EXPANDED, DIVE = range(6)
"""Places of a search's `numbers`: rows, entries of the heap, the incumbent's cost, its row or -1,
rows expanded, and the row that the search dives into or -1."""


@njit
def find(row: Ints, rows: Ints, table: Ints) -> Any:
    """Return the place of a row in the hash table: its own, or the empty one for it."""
    h = np.uint64(1469598103934665603)
    for at in range(row.shape[0]):
        h = (h ^ np.uint64(row[at])) * np.uint64(1099511628211)

    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    mask = table.shape[0] - 1
    place = np.int64(h & np.uint64(mask))

    # Open addressing: go on until the row or an empty place is met; the table is never full.
    while table[place] >= 0:
        known = table[place]
        same = True
        for k in range(row.shape[0]):
            if rows[known, k] != row[k]:
                same = False
                break

        if same:
            return place

        place = (place + 1) & mask

    return place


@njit
def enter(rows: Ints, old: Ints, table: Ints) -> None:
    """Fill an empty table, whose size is a power of 2, with the rows of a smaller one."""
    for place in range(old.shape[0]):
        if old[place] >= 0:
            table[find(rows[old[place]], rows, table)] = old[place]


@njit
def _is_before(heap: Ints, a: int, b: int) -> bool:
    return heap[a, 0] < heap[b, 0] or (heap[a, 0] == heap[b, 0] and heap[a, 1] < heap[b, 1])


@njit
def _copy(heap: Ints, source: int, target: int) -> None:
    for k in range(3):
        heap[target, k] = heap[source, k]


@njit
def push(heap: Ints, size: int, f: int, tie: int, row: int) -> None:
    """Add an entry to a heap of ``size``. The place after the entries is scratch space."""
    heap[size, 0], heap[size, 1], heap[size, 2] = f, tie, row
    at, new = size, size + 1
    _copy(heap, size, new)

    # The new entry rises past every parent that comes after it.
    while at > 0 and _is_before(heap, new, (at - 1) >> 1):
        _copy(heap, (at - 1) >> 1, at)
        at = (at - 1) >> 1

    _copy(heap, new, at)


@njit
def pop(heap: Ints, size: int) -> None:
    """Remove the first entry of a heap of ``size``."""
    last, at = size - 1, 0
    while True:
        down = 2 * at + 1
        if down + 1 < last and _is_before(heap, down + 1, down):
            down += 1
        # The last entry, which fills the gap, comes before both children: it stays here.
        if down >= last or not _is_before(heap, down, last):
            break

        _copy(heap, down, at)
        at = down

    _copy(heap, last, at)
