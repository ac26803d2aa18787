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
        self._caller = np.repeat(np.arange(self.n), self.count)
        by_predecessor = np.argsort(self.before, kind="stable")
        self.next: Ints = self._caller[by_predecessor]
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
        missing = self.count.tolist()
        order = [i for i, count in enumerate(missing) if count == 0]
        for i in order:
            for k in self.followers(i):
                missing[k] -= 1
                if missing[k] == 0:
                    order.append(k)

        return order

    @cached_property
    def session(self) -> Ints:
        """Number of each request's session, in the order of their first requests; shape (n,)."""
        root = list(range(self.n))

        def find(i: int) -> int:
            while root[i] != i:
                root[i] = i = root[root[i]]

            return i

        for pair in zip(self._caller.tolist(), self.before.tolist(), strict=True):
            low, high = sorted(map(find, pair))
            root[high] = low

        return np.unique([find(i) for i in range(self.n)], return_inverse=True)[1].astype(np.int64)

    def over(self, values: NDArray[Any], reduce: np.ufunc) -> NDArray[Any]:
        """Return values of requests, reduced over each session."""
        order = np.argsort(self.session, kind="stable")
        first = np.flatnonzero(np.diff(self.session[order], prepend=-1))
        return np.asarray(reduce.reduceat(values[order], first))

    def released(self, release: NDArray[Any], finish: NDArray[Any]) -> NDArray[Any]:
        """Return when requests are released; `release` holds for those without predecessors."""
        found = release.copy()
        called = np.flatnonzero(self.count)
        begins = (np.cumsum(self.count) - self.count)[called]
        found[called] = np.maximum.reduceat(finish[self.before], begins) + self.delay[called]
        return found

    @cached_property
    def line(self) -> list[int]:
        """The first request of each one's line: a part of a session that follows one by one."""
        found = list(range(self.n))
        for i in self.order:
            if self.count[i] == 1 and len(self.followers(p := self.after[i][0])) == 1:
                found[i] = found[p]

        return found

    def precedes(self, i: int, k: int) -> bool:
        """Return whether request k is i, or is released only after i has ended."""
        if self.line[i] == self.line[k]:
            return self._place[i] <= self._place[k]

        seen, rows = {k}, [k]
        for one in rows:
            new = [j for j in self.after[one] if j not in seen and self._place[j] >= self._place[i]]
            seen.update(new)
            rows += new

        return i in seen

    @cached_property
    def _place(self) -> dict[int, int]:
        return {i: place for place, i in enumerate(self.order)}

    def earliest(self, release: Sequence[Any], alone: Sequence[Any]) -> list[Any]:
        """Return when each request would be released if all took only the times `alone`.

        Where no schedule serves a request faster than that, none releases one earlier: along
        `order`, no predecessor ends before its earliest release and the time that it takes alone.
        Integers stay exact.
        """
        found = [0 if row else at for row, at in zip(self.after, release, strict=True)]
        delay = self.delay.tolist()
        for i in self.order:
            if row := self.after[i]:
                found[i] = max(found[j] + alone[j] for j in row) + delay[i]

        return found

    def tails(self, alone: Sequence[Any]) -> list[Any]:
        """Return how long after the end of each request its session goes on at least.

        The proof is that of `earliest`, along `order` from its end.
        """
        found, delay = [0] * self.n, self.delay.tolist()
        for i in reversed(self.order):
            for k in self.after[i]:
                found[k] = max(found[k], delay[i] + alone[i] + found[i])

        return found

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
        waits = zip(plain_numbers(self.delay), self.after, strict=True)
        return {
            "after": [list(row) if len(row) > 1 else next(iter(row), None) for row in self.after],
            "delay": [value if row else None for value, row in waits],
        }


def check_sessions(instance: Any, longest: float) -> tuple[Any, After | None, NDArray[Any] | None]:
    """Return arrivals with 0 for requests that come after others, and the columns of sessions.

    Columns in which nothing comes after anything are absent ones. `longest`: of a delay.
    """
    arrival, after, delay = instance.arrival, instance.after, instance.delay
    if after is None:
        if delay is not None:
            raise InputError("requests.after: found nothing; expected it beside delay")

        return arrival, None, None

    arrival, n = list(arrival), len(arrival)
    found = {}
    for name, column in (("after", after), ("delay", [0] * n if delay is None else delay)):
        if isinstance(column, (str, bytes, dict)) or not hasattr(column, "__len__"):
            raise InputError(f"requests.{name}: found {column!r}; expected a list")

        same_length(n, {name: column})
        found[name] = list(column)

    rows = tuple(_predecessors(i, row, n) for i, row in enumerate(found["after"]))
    for i, row in enumerate(rows):
        given = arrival[i]
        if not row:
            if found["delay"][i] not in (None, 0):
                raise InputError(
                    f"requests.delay: request {i}: found {found['delay'][i]!r}; expected null or "
                    "0, since it comes after no request"
                )

            continue
        if given is not None and given != UNKNOWN:
            raise InputError(
                f"requests.arrival: request {i}: found {given!r}, and requests.after "
                f"{found['after'][i]!r}; expected null beside after, or no after"
            )

        arrival[i] = 0

    if not any(rows):
        return instance.arrival, None, None

    check = whole_column if instance.time_unit == "round" else real_column
    waits = check([v or 0 for v in found["delay"]], "requests.delay", 0, longest)  # type: ignore[arg-type]
    sessions = Sessions(rows, waits)
    if len(sessions.order) < n:
        i = min(set(range(n)).difference(sessions.order))
        raise InputError(
            f"requests.after: request {i}: found {found['after'][i]!r}, after which it comes in a "
            "circle; expected requests that do not wait for each other"
        )

    return arrival, rows, waits


def _predecessors(i: int, given: Any, n: int) -> tuple[int, ...]:
    row = [] if given is None else given
    if isinstance(row, (int, np.integer)):
        row = [] if row == UNKNOWN else [row]
    if not isinstance(row, (list, tuple, np.ndarray)):
        raise InputError(
            f"requests.after: request {i}: found {given!r}; expected a request, a list or null"
        )

    where = f"requests.after: request {i}"
    found = tuple(whole_number(j, where, 0, n - 1) for j in row)
    if len(set(found)) < len(found) or i in found:
        raise InputError(f"{where}: found {given!r}; expected other requests, each once")

    return found
