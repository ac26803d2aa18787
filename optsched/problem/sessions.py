"""Sessions: requests that are released when others end, as the calls of an agent are.

A request that comes after others, its *predecessors*, is released `delay` after the last of them
has ended, in whatever schedule. The delay is what happens outside the server, such as a tool that
runs, and faster service does not shorten it. Requests that are linked, however far, are one
session. Its calls may follow one another, several may come after one (sub-agents), and one may come
after several (a call that waits for all its sub-agents).
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.columns import (
    plain_numbers,
    real_column,
    same_length,
    whole_column,
    whole_number,
)
from optsched.problem.errors import InputError

Ints = NDArray[np.int64]
After = tuple[tuple[int, ...], ...]

UNKNOWN = -1
"""The arrival, in an instance's column, of a request that comes after others."""


def first_of_group(up: list[int], i: int) -> int:
    """Return the first request of i's group, and shorten the way up to it (union-find)."""
    while up[i] != i:
        up[i] = i = up[up[i]]

    return i


class Sessions:
    """Which requests come after which, as flat arrays.

    Parameters
    ----------
    after : tuple of tuples of int
        The predecessors of each request.
    delay : ndarray, shape (n,)
        Time from the end of the last predecessor to the release of each request.
    """

    def __init__(self, after: After, delay: NDArray[Any]) -> None:
        self.n, self.after, self.delay = len(after), after, delay
        self.count: Ints = np.array([len(row) for row in after], dtype=np.int64)
        """Number of predecessors of each request, shape (n,)."""
        self.before: Ints = np.fromiter(chain.from_iterable(after), np.int64, int(self.count.sum()))
        """Predecessors of all requests, those of one after those of another."""
        self._waiting = np.repeat(np.arange(self.n), self.count)  # beside each entry of `before`
        by_predecessor = np.argsort(self.before, kind="stable")
        self.next: Ints = self._waiting[by_predecessor]
        """Requests that come after each request, those of one after those of another."""
        self.next_offsets: Ints = np.append(
            0, np.cumsum(np.bincount(self.before, minlength=self.n))
        )
        """Those that come after request i are ``next[next_offsets[i]:next_offsets[i + 1]]``."""

    def followers(self, i: int) -> list[int]:
        """Return the requests that come after request i."""
        return list(self.next[self.next_offsets[i] : self.next_offsets[i + 1]].tolist())

    @cached_property
    def order(self) -> list[int]:
        """The requests, each behind its predecessors; without those that wait in a circle."""
        missing = self.count.tolist()  # predecessors of each that are not in the order yet
        order = [i for i, count in enumerate(missing) if count == 0]
        for i in order:  # which grows meanwhile
            for k in self.followers(i):
                missing[k] -= 1
                if missing[k] == 0:
                    order.append(k)

        return order

    @cached_property
    def session(self) -> Ints:
        """Number of each request's session, in the order of their first requests; shape (n,).

        Linked requests are joined into trees, whose root is the first of them (union-find).
        """
        up = list(range(self.n))
        for i, q in zip(self._waiting.tolist(), self.before.tolist(), strict=True):
            low, high = sorted((first_of_group(up, i), first_of_group(up, q)))
            up[high] = low

        roots = [first_of_group(up, i) for i in range(self.n)]
        return np.unique(roots, return_inverse=True)[1].astype(np.int64)

    def over(self, values: NDArray[Any], reduce: np.ufunc) -> NDArray[Any]:
        """Return values of requests, reduced over each session."""
        order = np.argsort(self.session, kind="stable")
        first = np.flatnonzero(np.diff(self.session[order], prepend=-1))
        return np.asarray(reduce.reduceat(values[order], first))

    def release_times(self, release: NDArray[Any], finish: NDArray[Any]) -> NDArray[Any]:
        """Return when requests are released; `release` holds for those without predecessors."""
        times = release.copy()
        called = np.flatnonzero(self.count)
        # Where the predecessors of each begin in `before`; `reduceat` takes no empty parts.
        begins = (np.cumsum(self.count) - self.count)[called]
        times[called] = np.maximum.reduceat(finish[self.before], begins) + self.delay[called]
        return times

    @cached_property
    def line(self) -> list[int]:
        """The first request of each one's line: a part of a session that follows one by one."""
        # A request goes on with the line of its only predecessor, if no other comes after that.
        head = list(range(self.n))
        for i in self.order:
            if self.count[i] == 1 and len(self.followers(p := self.after[i][0])) == 1:
                head[i] = head[p]

        return head

    def precedes(self, i: int, k: int) -> bool:
        """Return whether request k is i, or is released only after i has ended."""
        # `_place` is that in `order`, where each request is behind its predecessors. In a line each
        # comes after the one before it.
        if self.line[i] == self.line[k]:
            return self._place[i] <= self._place[k]

        # Go back from k. What stands before i in `order` does not come after i, so it is left out.
        seen, to_visit = {k}, [k]
        for later in to_visit:  # which grows meanwhile
            new = set(self.after[later]) - seen
            reachable = [j for j in new if self._place[j] >= self._place[i]]
            seen.update(reachable)
            to_visit += reachable

        return i in seen

    @cached_property
    def _place(self) -> dict[int, int]:
        """The place of each request in `order`."""
        return {i: place for place, i in enumerate(self.order)}

    def earliest(self, release: Sequence[Any], alone: Sequence[Any]) -> list[Any]:
        """Return when each request would be released if all took only the times `alone`.

        Where no schedule serves a request faster than that, none releases one earlier: along
        `order`, no predecessor ends before its earliest release and the time that it takes alone.
        Integers stay exact.
        """
        earliest = [0 if row else time for row, time in zip(self.after, release, strict=True)]
        delay = self.delay.tolist()
        for i in self.order:
            if row := self.after[i]:
                earliest[i] = max(earliest[j] + alone[j] for j in row) + delay[i]

        return earliest

    def tails(self, alone: Sequence[Any]) -> list[Any]:
        """Return how long after the end of each request its session goes on at least.

        The proof is that of `earliest`, along `order` from its end.
        """
        tails, delay = [0] * self.n, self.delay.tolist()
        for i in reversed(self.order):
            for k in self.after[i]:
                tails[k] = max(tails[k], delay[i] + alone[i] + tails[i])

        return tails

    def subset(self, who: Ints) -> dict[str, Any]:
        """Return the columns of some requests, which come with all their predecessors."""
        place = {i: k for k, i in enumerate(who.tolist())}
        after = list[tuple[int, ...]]()
        for i in who.tolist():
            if missing := [j for j in self.after[i] if j not in place]:
                raise InputError(
                    f"requests.after: request {i}: found it without request {missing[0]}, which it "
                    "comes after; expected whole sessions in a part of an instance"
                )

            after.append(tuple(place[j] for j in self.after[i]))

        return {"after": tuple(after), "delay": self.delay[who]}

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as in a file: null, one request or a list; null for no delay."""

        def plain(row: tuple[int, ...]) -> list[int] | int | None:
            return list(row) if len(row) > 1 else next(iter(row), None)

        delays = zip(plain_numbers(self.delay), self.after, strict=True)
        return {
            "after": [plain(row) for row in self.after],
            "delay": [delay if row else None for delay, row in delays],
        }


def check_sessions(instance: Any, longest: float) -> tuple[Any, After | None, NDArray[Any] | None]:
    """Check an instance's sessions, and return `arrival`, `after` and `delay` as they should be.

    Requests that come after others have the arrival 0. Where nothing comes after anything, `after`
    and `delay` are None. `longest`: the max delay.
    """
    arrival, after, delay = instance.arrival, instance.after, instance.delay
    if after is None:
        if delay is not None:
            raise InputError("requests.after: found nothing; expected it beside delay")

        return arrival, None, None

    arrival, n = list(arrival), len(arrival)
    after = _list_of("after", after, n)
    delay = [0] * n if delay is None else _list_of("delay", delay, n)
    rows = tuple(_predecessors(i, row, n) for i, row in enumerate(after))
    for i, row in enumerate(rows):
        if row and arrival[i] not in (None, UNKNOWN):
            raise InputError(
                f"requests.arrival: request {i}: found {arrival[i]!r}, and requests.after "
                f"{after[i]!r}; expected null beside after, or no after"
            )
        if not row and delay[i] not in (None, 0):
            raise InputError(
                f"requests.delay: request {i}: found {delay[i]!r}; expected null or 0, since it "
                "comes after no request"
            )

    if not any(rows):
        return instance.arrival, None, None

    arrival = [0 if row else time for row, time in zip(rows, arrival, strict=True)]
    check = whole_column if instance.time_unit == "round" else real_column
    delays = check([v or 0 for v in delay], "requests.delay", 0, longest)  # type: ignore[arg-type]
    sessions = Sessions(rows, delays)
    if len(sessions.order) < n:
        i = min(set(range(n)).difference(sessions.order))
        raise InputError(
            f"requests.after: request {i}: found {after[i]!r}, after which it comes in a circle; "
            "expected requests that do not wait for each other"
        )

    return arrival, rows, delays


def _list_of(name: str, column: Any, n: int) -> list[Any]:
    """Return a column of requests as a list, checked to be one."""
    if isinstance(column, (str, bytes, dict)) or not hasattr(column, "__len__"):
        raise InputError(f"requests.{name}: found {column!r}; expected a list")

    same_length(n, {name: column})
    return list(column)


def _predecessors(i: int, entry: Any, n: int) -> tuple[int, ...]:
    """Return the predecessors of request i from its entry: a request, a list, None or -1."""
    row = [] if entry is None else entry
    if isinstance(row, (int, np.integer)):
        row = [] if row == UNKNOWN else [row]
    if not isinstance(row, (list, tuple, np.ndarray)):
        raise InputError(
            f"requests.after: request {i}: found {entry!r}; expected a request, a list or null"
        )

    where = f"requests.after: request {i}"
    predecessors = tuple(whole_number(j, where, 0, n - 1) for j in row)
    if len(set(predecessors)) < len(predecessors) or i in predecessors:
        raise InputError(f"{where}: found {entry!r}; expected other requests, each once")

    return predecessors
