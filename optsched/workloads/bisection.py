"""The place where a monotone function reaches a value."""

from collections.abc import Callable


def bisect(is_below: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """Return the middle of the interval in which `is_below` turns false, halved so many times."""
    for _ in range(steps):
        middle = (low + high) / 2
        if is_below(middle):
            low = middle
        else:
            high = middle

    return (low + high) / 2
