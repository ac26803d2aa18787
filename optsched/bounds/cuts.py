"""Where a trace is cut into pieces whose bounds are added (`optsched.bounds.pieces`)."""

import numpy as np
from numpy.typing import NDArray


def cut_where_quiet(
    arrival: NDArray[np.float64],
    finish: NDArray[np.float64],
    smallest: int,
    largest: int,
    quiet: float = np.inf,
) -> list[tuple[int, int]]:
    """Return consecutive ranges of requests, cut before arrivals that find few in the system.

    `arrival` (shape (n,)): when they come; it ascends.
    `finish` (shape (n,)): when the requests leave, in any order. An estimate will do.
    `smallest`, `largest`: requests of a piece, 1 <= smallest <= largest. The last piece may have
    fewer, and a piece has more where it is never quiet.
    `quiet`: a cut is only where an arrival finds at most so many in the system.
    """
    n = len(arrival)
    # By arrival, how many earlier requests are still there: those before it less those that have
    # left, whoever they are.
    others = np.arange(n) - np.searchsorted(np.sort(finish), arrival, "right")
    pieces, first = [], 0

    while n - first > largest:
        # The quietest arrival of those allowed. If it is not quiet, the next one that is.
        cut = first + smallest + int(np.argmin(others[first + smallest : first + largest + 1]))
        if others[cut] > quiet:
            later = np.flatnonzero(others[first + largest :] <= quiet)
            if len(later) == 0:
                break

            cut = first + largest + int(later[0])

        pieces.append((first, cut))
        first = cut

    pieces.append((first, n))
    return pieces
