"""How the laboratory shows where long work stands, and notices that it shall end."""

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
"""Seconds before a bar appears: what is quick shows none."""


class Bar:
    """A bar on standard error that goes when the work ends; nothing where that is no terminal.

    Parameters
    ----------
    what : str
        Words before the bar.
    total : float
        What `show` counts up to.
    wanted : bool
        Whether to show it at all.
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
        """Move the bar, and put words behind it."""
        with self._lock:
            self._done, self._words = done, words
            if self._bar is not None:
                self._bar.update(self._task, completed=done, words=words)

    def solving(self, state: Progress) -> None:
        """Show where a solve stands."""
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
                return  # the work has ended meanwhile
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
    """Yield an event that Ctrl-C sets, beside the interrupt that it always is.

    A solve takes Ctrl-C for its own end and returns what it has: the event tells whoever runs
    many of them. Outside the main thread it stays as it is.
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
