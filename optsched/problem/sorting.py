"""Sorting inside compiled loops, where numba takes 2 to 4 s to compile numpy's."""

from typing import Any

from optsched.problem.kernel import njit


@njit(allocates=False)
def sort_up(values: Any, size: int) -> None:
    """Sort the first numbers of an array, in place (Shell 1959)."""
    gap = size // 2
    # The last gap is 1, which sorts whatever is left; the ones before make it quick.
    while gap > 0:
        for k in range(gap, size):
            value, place = values[k], k
            while place >= gap and values[place - gap] > value:
                values[place] = values[place - gap]
                place -= gap

            values[place] = value

        gap //= 2
