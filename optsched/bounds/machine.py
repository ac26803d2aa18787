"""One preemptive machine: schedules of jobs with release dates, in exact integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush


def srpt_completions(release: Sequence[int], length: Sequence[int]) -> Iterator[int]:
    """Yield the completion times of shortest remaining processing time, ascending.

    Parameters
    ----------
    release, length : sequence of int
        Release date and length of each job, in any common unit and any order.

    Yields
    ------
    int
        At every moment at least as many jobs are complete as under any rule (Schrage 1968).
    """
    waiting: list[int] = []
    now = 0
    for at, work in sorted(zip(release, length, strict=True)):
        while waiting and now + waiting[0] <= at:
            now += heappop(waiting)
            yield now
        if waiting and now < at:
            # The head stays the smallest when it shrinks, so the heap needs no repair.
            waiting[0] -= at - now
        now = max(now, at)
        heappush(waiting, work)
    while waiting:
        now += heappop(waiting)
        yield now
