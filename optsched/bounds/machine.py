"""One preemptive machine: schedules of jobs with release dates, in exact integers."""

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

from optsched.bounds.checker.requests import srpt_completions as srpt_completions


def shortest_first(
    release: Sequence[Any], length: Sequence[Any], key: Sequence[Any] | None = None
) -> Iterator[tuple[Any, Any, int]]:
    """Yield the pieces of the preemptive schedule that runs the shortest job first.

    At each moment it runs the released, unfinished job of the smallest whole length, not of the
    smallest rest; among equals the one of the smallest number. With integers it is exact.
    """
    keys = length if key is None else key
    order = sorted(range(len(release)), key=release.__getitem__)
    rest = list(length)
    waiting: list[tuple[Any, int]] = []
    now = release[order[0]]
    coming, n = 0, len(order)

    while coming < n or waiting:
        if not waiting:
            now = max(now, release[order[coming]])
        while coming < n and release[order[coming]] <= now:
            heappush(waiting, (keys[order[coming]], order[coming]))
            coming += 1

        job = waiting[0][1]
        until = release[order[coming]] if coming < n else math.inf
        end = min(now + rest[job], until)
        rest[job] -= end - now
        if end < until or rest[job] <= 0:
            heappop(waiting)

        yield now, end, job
        now = end
