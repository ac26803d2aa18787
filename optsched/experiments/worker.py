"""A process of its own for trials: it crashes or eats memory without harm to the experiment.

`optsched.experiments.isolation` starts this file as a script, which imports nothing of optsched
until it has been told where optsched is.

**What goes through the pipes**, pickled: to stdin the parent's process id, its ``sys.path``, then
for each trial the pickled function and its argument; the end of stdin ends this process. From
stdout the version of the code, then for each trial one of ``("result", row, wall_s)``,
``("failed", why, wall_s)``, ``("refused", error)``.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

IDLE_S = 300.0
"""A process that hears nothing for so long ends; another is started when one is needed."""


def main() -> None:
    """Run the trials that come through stdin; see the module's head."""
    orders = sys.stdin.buffer
    # What native code prints to stdout must not get between the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        _end_with(pickle.load(orders))
        sys.path[:] = pickle.load(orders)
    except EOFError:  # the parent has ended meanwhile
        return
    # The parent decides what these mean; this process ends when it does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    warnings.formatwarning = _one_line
    with suppress(OSError):  # where memory runs out the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")

    def tell(message: Any) -> None:
        pickle.dump(message, out, protocol=5)
        out.flush()

    from optsched.experiments.isolation import attempt
    from optsched.experiments.store import code_version

    inbox: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            try:
                inbox.put(pickle.load(orders))
            except BaseException:
                os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    tell(code_version())
    while True:
        try:
            pickled, trial = inbox.get(timeout=IDLE_S)
        except queue.Empty:
            os._exit(0)
        tell(attempt(partial(_run, pickled), trial))


def _run(pickled: bytes, trial: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = pickle.loads(pickled)(trial)
    return row


def _end_with(parent: int) -> None:
    """Have the system end this process when the thread that started it ends.

    The end of stdin is not enough: compiled code may keep Python from seeing it for minutes.
    """
    if sys.platform != "linux":
        return
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def _one_line(message: Warning | str, *place: Any, **more: Any) -> str:
    return "warning: " + " ".join(str(message).split()) + "\n"


if __name__ == "__main__":
    main()
