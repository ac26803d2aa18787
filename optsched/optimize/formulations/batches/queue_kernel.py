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
    """Return the place of a row in the hash table: its own, or the empty one for it.

    The table has indices into ``rows``, or -1 in empty places, and its size is a power of 2.
    """
    # A hash of FNV's kind (its offset and prime) over the codes, mixed so that the low bits count.
    h = np.uint64(1469598103934665603)
    for k in range(row.shape[0]):
        h = (h ^ np.uint64(row[k])) * np.uint64(1099511628211)

    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    mask = table.shape[0] - 1
    place = np.int64(h & np.uint64(mask))

    # Open addressing: go on until the row or an empty place is met; the table is never full.
    while table[place] >= 0:
        known = table[place]
        same = True
        for m in range(row.shape[0]):
            if rows[known, m] != row[m]:
                same = False
                break

        if same:
            return place

        place = (place + 1) & mask

    return place


@njit
def enter(rows: Ints, smaller: Ints, table: Ints) -> None:
    """Fill an empty table, whose size is a power of 2, with the rows of a smaller one."""
    for place in range(smaller.shape[0]):
        if smaller[place] >= 0:
            table[find(rows[smaller[place]], rows, table)] = smaller[place]


@njit
def _is_before(heap: Ints, a: int, b: int) -> bool:
    """Whether entry a is taken before b: by its bound f, then by its tie."""
    return heap[a, 0] < heap[b, 0] or (heap[a, 0] == heap[b, 0] and heap[a, 1] < heap[b, 1])


@njit
def _copy(heap: Ints, source: int, target: int) -> None:
    for k in range(3):
        heap[target, k] = heap[source, k]


@njit
def push(heap: Ints, size: int, f: int, tie: int, row: int) -> None:
    """Add the entry (f, tie, row) to a heap of ``size`` entries.

    The place after them is scratch space.
    """
    heap[size, 0], heap[size, 1], heap[size, 2] = f, tie, row
    place, new = size, size + 1
    _copy(heap, size, new)

    # The new entry rises past every parent that comes after it.
    while place > 0 and _is_before(heap, new, (place - 1) >> 1):
        _copy(heap, (place - 1) >> 1, place)
        place = (place - 1) >> 1

    _copy(heap, new, place)


@njit
def pop(heap: Ints, size: int) -> None:
    """Remove the first entry of a heap of ``size``."""
    last, place = size - 1, 0
    # The gap at the top sinks past the smaller child of each place.
    while True:
        child = 2 * place + 1
        if child + 1 < last and _is_before(heap, child + 1, child):
            child += 1
        # The last entry, which fills the gap, comes before both children: it stays here.
        if child >= last or not _is_before(heap, child, last):
            break

        _copy(heap, child, place)
        place = child

    _copy(heap, last, place)
