"""A way to notice that long work on ratios shall end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_noted() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets in the main thread, in addition to its usual effect.

    It tells the caller who runs many solvers, each of which ends on Ctrl-C with what it has found.
    """
    noted = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread may set handlers, and a usual effect that is no function cannot be
    # called after the event is set. Then the event is never set.
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
