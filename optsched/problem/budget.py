"""Time limits, the wish to stop, and progress: what everything that searches is given."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a bound, a search or a solve stands.

    Parameters
    ----------
    elapsed_s : float
        Seconds since the work began.
    incumbent, bound : float or None
        Best objective and best bound so far, None where unknown.
    """

    elapsed_s: float
    incumbent: float | None
    bound: float | None


class History:
    """A progress call that keeps when incumbent or bound changed, and tells another.

    Parameters
    ----------
    tell : callable, optional
        Called with every `Progress`.
    most : int
        Changes kept; of more, every other one is dropped, never the latest.
    """

    def __init__(self, tell: Callable[[Progress], None] | None = None, most: int = 1000) -> None:
        self._tell = tell
        self._most = most
        self._kept: list[Progress] = []

    def __call__(self, state: Progress) -> None:
        """Keep a state if it is news, and tell it."""
        known = self._kept[-1] if self._kept else None
        if known is None or (known.incumbent, known.bound) != (state.incumbent, state.bound):
            self._kept.append(state)
            if len(self._kept) > self._most:
                del self._kept[-2::-2]
        if self._tell is not None:
            self._tell(state)

    def until(
        self, elapsed_s: float, incumbent: float | None, bound: float | None
    ) -> tuple[Progress, ...]:
        """Return what was kept, with the end of the solve as its last entry."""
        return (*self._kept, Progress(elapsed_s, incumbent, bound))


def progress_columns(progress: Sequence[Progress]) -> dict[str, list[float | None]] | None:
    """Return a history as columns of a result file, None where there is none."""
    if not progress:
        return None
    return {
        "elapsed_s": [round(state.elapsed_s, 6) for state in progress],
        "incumbent": [state.incumbent for state in progress],
        "bound": [state.bound for state in progress],
    }


class Budget:
    """A deadline, a wish to stop, and who is told of progress.

    Parameters
    ----------
    time_limit_s : float or None
        Seconds from now on; None is no limit.
    stop : threading.Event, optional
        When set, the work ends and what it has found is kept.
    progress : callable, optional
        Called with a `Progress` whenever something better was found.
    """

    def __init__(
        self,
        time_limit_s: float | None = None,
        *,
        stop: threading.Event | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.begin = time.perf_counter()
        self.limit_s = math.inf if time_limit_s is None else float(time_limit_s)
        self.stop = stop
        self.progress = progress

    @property
    def spent_s(self) -> float:
        """Seconds since the budget was made."""
        return time.perf_counter() - self.begin

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0 and infinite without one; 0 once stopped."""
        return 0.0 if self.stopped else max(0.0, self.limit_s - self.spent_s)

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for the end."""
        return self.stop is not None and self.stop.is_set()

    @property
    def over(self) -> bool:
        """Whether the work should end: it was stopped, or its time is up."""
        return self.stopped or self.spent_s >= self.limit_s

    def part(self, share: float, progress: Callable[[Progress], None] | None = None) -> Budget:
        """Return a budget of a share of what is left, which stops when this one does."""
        return Budget(share * self.left_s, stop=self.stop, progress=progress or self.progress)

    def tell(self, *, incumbent: float | None = None, bound: float | None = None) -> None:
        """Tell the values known now to who wants to know."""
        if self.progress is not None:
            self.progress(Progress(self.spent_s, incumbent, bound))
