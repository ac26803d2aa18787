"""Run trials in processes of their own, one per thread, so that a crash costs only one trial.

The pools of joblib, concurrent.futures and Dask share their processes among all trials. When one
process dies, they call the trials of the others broken too. None of them says which trial it was or
how it ended. multiprocessing imports the caller's script again in every process. Therefore
optsched starts the processes itself, and the pools only supply the threads that wait for them.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from optsched.experiments.base import Row, Run
from optsched.problem.errors import InputError, OptschedError, SolverError, UsageError

ATTEMPTS = 2
"""How often a trial is tried whose process dies, since it may have been ended from outside."""

Answer = tuple[str, Any, float]
"""``("result", row, wall_s)``, ``("failed", why, wall_s)`` or ``("refused", error, wall_s)``."""

_LOOK_S = 0.1
_ONE_THREAD = dict.fromkeys(
    ("MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)
"""Processes share the cores, so each has one thread. The caller's own settings override this."""


def attempt(run: Run, trial: Row) -> Answer:
    """Run a trial in this process.

    `InputError` and `UsageError` mean that no trial could run, so that the experiment is refused.
    Any other exception is the failure of this trial alone.
    """
    begin = time.perf_counter()
    content: Any
    try:
        kind, content = "result", run(trial)
    except (InputError, UsageError) as error:
        kind, content = "refused", error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind = "failed"
        content = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")

    return kind, content, time.perf_counter() - begin


class Isolation:
    """Processes for trials, one for each thread that asks.

    All of them must run the version ``code`` of the code. A trial that uses more than
    ``memory_limit`` bytes of memory is ended. The processes that a solver starts count too. The
    memory is measured ten times a second.
    """

    def __init__(self, code: str, memory_limit: int | None = None) -> None:
        if memory_limit is not None and not Path("/proc/self/statm").exists():
            raise UsageError(
                "--memory-limit: found no /proc/self/statm; expected Linux (leave the option out)"
            )

        self._code = code
        self._limit = memory_limit
        self._own = threading.local()
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self._closed = False

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, run: Run, trial: Row) -> Answer:
        """Run a trial in the process of the calling thread.

        The function is at the top level of its module, or a partial of such a function. If the
        process does not start, or runs other code, an error is raised.
        """
        begin = time.perf_counter()
        # The function is pickled separately, so that only the trial fails if it cannot be imported.
        order = pickle.dumps((pickle.dumps(run), trial))
        why = ""

        for _ in range(ATTEMPTS):
            try:
                return self._child().ask(order, self._limit)
            except _TooMuchError:
                why = f"more memory than the limit of {memory_text(self._limit or 0)}"
                break
            except _DiedError as died:
                why = f"its process {died}, {ATTEMPTS} times"

        if self._closed:  # then `close` ended the process, and not the trial
            raise OptschedError("the experiment has ended")

        return "failed", why, time.perf_counter() - begin

    def _child(self) -> _Child:
        """Return the process of the calling thread, and start one if it has none."""
        child: _Child | None = getattr(self._own, "child", None)
        how = ""
        for _ in range(ATTEMPTS):
            if child is not None and child.alive():
                return child
            with self._lock:
                if self._closed:
                    raise OptschedError("the experiment has ended")

                child = _Child()
                self._children = [c for c in self._children if c.alive()] + [child]

            self._own.child = child
            try:
                found = child.receive()
            except _DiedError as died:
                how = str(died)
                continue

            if found != self._code:
                raise OptschedError(
                    f"found optsched {found} in a process for trials; expected {self._code}, the "
                    "same code in all processes and unchanged while they run"
                )

            return child

        raise SolverError(f"a process for trials does not start: it {how}")

    def close(self) -> None:
        """End the processes and the trials that they run."""
        with self._lock:
            self._closed = True
            for child in self._children:
                child.end()


class _DiedError(Exception):
    """A process ended without an answer. The message says how."""


class _TooMuchError(Exception):
    """A process used more memory than allowed."""


class _Child:
    """A process that runs `optsched.experiments.worker`."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "optsched.experiments.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the parent. A process group of its own can be ended as a whole, with
            # the processes of the solvers.
            start_new_session=True,
            env={**_ONE_THREAD, **os.environ, "PYTHONPATH": paths},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, order: bytes, limit: int | None) -> Answer:
        try:
            self._orders.write(order)
            self._orders.flush()
        except OSError:
            raise _DiedError(self._fate()) from None

        while limit is not None and not select.select([self._answers], [], [], _LOOK_S)[0]:
            if memory_in_use(self._process.pid) > limit:
                self.end()
                raise _TooMuchError

        answer: Answer = self.receive()
        return answer

    def receive(self) -> Any:
        try:
            return pickle.load(self._answers)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            raise _DiedError(self._fate()) from None

    def _fate(self) -> str:
        status = self._process.wait()
        if status >= 0:
            return f"ended with status {status}"

        return f"was ended by {signal.Signals(-status).name}"

    def end(self) -> None:
        if self.alive():
            with suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()

        self._process.wait()
        for pipe in (self._orders, self._answers):
            with suppress(OSError, ValueError):
                pipe.close()


def memory_in_use(process: int) -> int:
    """Return the bytes of memory of a process and its descendants, or 0 if it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        total = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in (folder / "task").iterdir():
            for child in (thread / "children").read_text().split():
                total += memory_in_use(int(child))
    except OSError:
        return 0

    return total


_UNITS = {"": 1} | {
    letter + i: base**power
    for power, letter in enumerate("kmgt", start=1)
    for i, base in (("", 1000), ("i", 1024))
}


def memory_bytes(text: str) -> int:
    """Return the bytes that a text such as ``4GiB``, ``500MB`` or ``1000`` means."""
    found = re.fullmatch(r"([\d.]+)\s*(?:([kmgt]i?)?b)?", text.strip(), re.ASCII | re.IGNORECASE)
    try:
        value = int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else 0
    except (OverflowError, ValueError):
        value = 0

    if value < 1:
        raise InputError(
            f"--memory-limit: found {text!r}; expected an amount such as 4GiB or 500MB"
        )

    return value


def memory_text(value: int) -> str:
    """Return an amount of memory as a text that people read, such as ``4 GiB``."""
    power = min(4, (value.bit_length() - 1) // 10)
    return f"{value / 1024**power:.4g} {'KMGT'[power - 1]}iB" if power > 0 else f"{value} bytes"
