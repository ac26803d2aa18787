"""Progress bars for long work on ratios, and a way to notice that it shall end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from optsched.problem.budget import Progress
from optsched.problem.markup import number

DELAY_S = 1.0
"""Seconds before a bar appears, so that quick work shows none."""


class Bar:
    """A bar on standard error that disappears when the work ends.

    Where standard error is not a terminal, nothing is shown.

    Parameters
    ----------
    what : str
        The words before the bar.
    total : float
        The value that `show` counts up to.
    wanted : bool
        Whether to show the bar at all.
    """

    def __init__(self, what: str, total: float, *, wanted: bool = True) -> None:
        self._what, self._total = what, total
        self._done, self._words = 0.0, ""
        self._wanted = wanted
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if self._wanted and sys.stderr.isatty():
            self._timer = threading.Timer(DELAY_S, self._start)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._bar is not None:
                self._bar.stop()

    def show(self, done: float, words: str = "") -> None:
        """Move the bar, and put words behind it.

        Parameters
        ----------
        done : float
            How much of ``total`` is done.
        words : str
            The words behind the bar.
        """
        with self._lock:
            self._done, self._words = done, words
            if self._bar is not None:
                self._bar.update(self._task, completed=done, words=words)

    def solving(self, state: Progress) -> None:
        """Show the progress of a solver: elapsed time, incumbent and bound.

        Parameters
        ----------
        state : Progress
        """
        ends = [
            f"{name} {number(value)}"
            for name, value in (("incumbent", state.incumbent), ("bound", state.bound))
            if value is not None
        ]
        self.show(state.elapsed_s, ", ".join(ends))

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._timer is None:
                return  # the work has ended in the meantime
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[words]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(
                self._what, total=self._total, completed=self._done, words=self._words
            )
            self._bar.start()


@contextmanager
def interrupts_noted() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, in addition to its usual effect.

    On Ctrl-C a solver ends and returns what it has found. The event tells the caller who runs many
    solvers. Outside the main thread the event is never set.
    """
    noted = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield noted
        return

    def handle(number: int, frame: Any) -> Any:
        noted.set()
        return before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
