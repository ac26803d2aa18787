"""Time limits, requests to stop and progress calls, which every search and bound is given."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import TypeVar

from optsched.problem.errors import InputError, OutOfTimeError

Item = TypeVar("Item")

# The seconds between two looks at a budget while code of others runs.
_LOOK_S = 0.1


class Clock:
    """The clock of all limits: seconds since some time, without those in which loops are compiled.

    numba compiles a loop at its first call, once per installation. That takes longer than many a
    time limit, so the clock stands still meanwhile (`optsched.problem.kernel` stops it).

    `tell`: called when the clock is stopped for the first time. `now`: what the seconds are of.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.perf_counter
        self.tell: Callable[[], None] = lambda: None
        self._depth = 0
        # Seconds for which it stood before, and since when it stands now or None. One value, so
        # that a thread that reads the clock never sees one half of a change.
        self._stood: tuple[float, float | None] = 0.0, None

    def __call__(self) -> float:
        """Return the time in seconds."""
        stood_s, since = self._stood
        return (self.now() if since is None else since) - stood_s

    @property
    def stood_s(self) -> float:
        """Seconds for which the clock has stood still: those of compiling."""
        stood_s, since = self._stood
        return stood_s + (0.0 if since is None else self.now() - since)

    @property
    def stands(self) -> bool:
        """Whether a loop is being compiled."""
        return self._depth > 0

    def stop(self) -> None:
        """Stop the clock until `go` was called as often: a compilation may begin within another."""
        self._depth += 1  # first, since numba calls `go` also if what follows raises
        if self._depth == 1:
            self._stood = self._stood[0], self.now()
            tell, self.tell = self.tell, lambda: None  # it is told once
            tell()

    def go(self) -> None:
        """Let the clock go on. Only the thread that holds numba's lock calls this and `stop`."""
        self._depth -= 1
        stood_s, since = self._stood
        if self._depth == 0 and since is not None:
            self._stood = stood_s + self.now() - since, None


work_time = Clock()
"""The one clock."""


@dataclass(frozen=True)
class Progress:
    """The state of running work; None for what is not found yet, and words for what begins."""

    elapsed_s: float
    incumbent: float | None = None
    bound: float | None = None
    doing: str = ""


class History:
    """A progress callback that records changes of incumbent or bound, and calls `tell` each time.

    Of more than `max_kept` changes every other one is dropped; the latest always stays.
    """

    def __init__(
        self, tell: Callable[[Progress], None] | None = None, max_kept: int = 1000
    ) -> None:
        self._tell = tell
        self._max_kept = max_kept
        self._kept: list[Progress] = []

    def __call__(self, state: Progress) -> None:
        """Record a state if it differs from the last one, and pass it on."""
        last = self._kept[-1] if self._kept else None
        if last is None or (last.incumbent, last.bound) != (state.incumbent, state.bound):
            self._kept.append(state)
            if len(self._kept) > self._max_kept:
                del self._kept[-2::-2]  # every other one, beginning before the latest

        if self._tell is not None:
            self._tell(state)

    def until(
        self, elapsed_s: float, incumbent: float | None, bound: float | None
    ) -> tuple[Progress, ...]:
        """Return the recorded changes, followed by one entry for the end of the work."""
        return (*self._kept, Progress(elapsed_s, incumbent, bound))


def progress_columns(progress: Sequence[Progress]) -> dict[str, list[float | None]] | None:
    """Return a history as the columns of a result file."""
    if not progress:
        return None

    return {
        "elapsed_s": [round(state.elapsed_s, 6) for state in progress],
        "incumbent": [state.incumbent for state in progress],
        "bound": [state.bound for state in progress],
    }


class Budget:
    """A deadline in seconds from now or None, an event that stops the work early, and a callback.

    The work then returns the best that it has found. The callback gets a `Progress` at each better
    one.
    """

    def __init__(
        self,
        time_limit_s: float | None = None,
        *,
        stop: threading.Event | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        if time_limit_s is not None and not (isinstance(time_limit_s, Real) and time_limit_s >= 0):
            raise InputError(f"time_limit: found {time_limit_s!r}; expected seconds >= 0")

        self.begin = work_time()
        self.limit_s = math.inf if time_limit_s is None else float(time_limit_s)
        self.stop = stop
        self.progress = progress

    @property
    def spent_s(self) -> float:
        """Seconds since the budget was made."""
        return work_time() - self.begin

    @property
    def left_s(self) -> float:
        """Seconds until the deadline: never negative, infinite without a limit, 0 once stopped."""
        return 0.0 if self.stopped else max(0.0, self.limit_s - self.spent_s)

    @property
    def stopped(self) -> bool:
        """Whether the event ``stop`` was set."""
        return self.stop is not None and self.stop.is_set()

    @property
    def over(self) -> bool:
        """Whether the work should end, because it was stopped or its time is up."""
        return self.stopped or self.spent_s >= self.limit_s

    def check(self, doing: str) -> None:
        """Raise `OutOfTimeError` if the work should end whose parts are of no use."""
        if self.over:
            why = "interrupted" if self.stopped else "time limit"
            raise OutOfTimeError(f"{why} while {doing}")

    @contextmanager
    def watching(self, doing: str) -> Iterator[None]:
        """Run code of others, which never calls `check`: a timer does so in the main thread.

        Python runs the handlers of signals there alone, so in another thread nothing watches.

        A timer that runs already, the caller's own or that of an outer budget, is left alone.
        """
        endless = self.stop is None and math.isinf(self.limit_s)
        is_main = threading.current_thread() is threading.main_thread()
        can_watch = is_main and hasattr(signal, "setitimer")  # Windows has no timers
        if endless or not can_watch or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            yield
            return

        def look(number: int, frame: object) -> None:
            if not work_time.stands:  # an exception would throw away what is compiled so far
                self.check(doing)

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        try:
            yield
        except SystemError as error:
            # A compiled loop that just ended reports what was raised meanwhile in this way.
            if isinstance(error.__cause__, OutOfTimeError):
                raise error.__cause__ from None

            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def through(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items from which a model is built, as long as `check` allows it."""
        for item in items:
            self.check("the model was built")
            yield item

    def part(self, share: float, progress: Callable[[Progress], None] | None = None) -> Budget:
        """Return a budget of a share of the time left, which stops with this one."""
        return Budget(share * self.left_s, stop=self.stop, progress=progress or self.progress)

    def tell(self, *, incumbent: float | None = None, bound: float | None = None) -> None:
        """Call the progress callback, if there is one, with the current values."""
        if self.progress is not None:
            self.progress(Progress(self.spent_s, incumbent, bound))


NO_LIMIT = Budget()
"""A budget that is never over."""
