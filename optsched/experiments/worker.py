"""A process that runs trials. If it crashes or uses too much memory, the experiment goes on.

`optsched.experiments.isolation` starts it as ``python -m optsched.experiments.worker PARENT``.
PARENT is the process id of the parent, whose ``sys.path`` is in ``PYTHONPATH``.

**The pipes** carry pickled objects. For each trial, stdin brings the pickled function and its
argument. The end of stdin ends this process. Stdout first gives the version of the code, and then
an `Answer` for each trial.
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

from optsched.experiments.base import Row
from optsched.experiments.isolation import attempt
from optsched.experiments.registry import load_studies
from optsched.experiments.store import code_version

IDLE_S = 300.0
"""A process that gets no trial for this many seconds ends. Another is started when needed."""


def main() -> None:
    """Run the trials that come through stdin, as the module's docstring says."""
    _end_with(int(sys.argv[1]))
    # Texts that native code prints to stdout must not get between the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # The parent decides what these signals mean, and this process ends when the parent does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    warnings.formatwarning = _one_line
    with suppress(OSError):  # when memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")

    def tell(message: Any) -> None:
        pickle.dump(message, out, protocol=5)
        out.flush()

    inbox: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(inbox,), daemon=True).start()
    tell(code_version())

    while True:
        try:
            packed, trial = inbox.get(timeout=IDLE_S)
        except queue.Empty:
            os._exit(0)

        tell(attempt(partial(_run, packed), trial))


def _run(packed: bytes, trial: Row) -> Row:
    load_studies()  # or their functions cannot be unpickled
    row: Row = pickle.loads(packed)(trial)
    return row


def _listen(inbox: queue.SimpleQueue[tuple[bytes, Any]]) -> None:
    """Pass on the trials from stdin. The end of stdin ends this process, even during a trial."""
    while True:
        try:
            inbox.put(pickle.load(sys.stdin.buffer))
        except BaseException:
            os._exit(1)


def _end_with(parent: int) -> None:
    """Have the system end this process when the thread that started it ends.

    The end of stdin is not enough, because compiled code may keep Python from seeing it for
    minutes.
    """
    if sys.platform != "linux":
        return

    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def _one_line(message: Warning | str, *place: Any, **more: Any) -> str:
    return "warning: " + " ".join(str(message).split()) + "\n"


if __name__ == "__main__":
    main()
