"""Processes for work that may crash, one for each thread that asks. A crash costs one call.

The pools of joblib, concurrent.futures and Dask share their processes among all calls. When one
process dies, they call the work of the others broken too, and none of them says which call it was
or how it ended. multiprocessing imports the caller's script again in every process. Therefore
optsched starts the processes itself, and threads of concurrent.futures wait for them.

On Linux nothing that a call has started outlives its process, whoever ends it and how: `_keep`.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import re
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from optsched.problem.errors import InputError, OptschedError, SolverError, in_words
from optsched.problem.kernel import LOST, UNKEPT

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS = 2
"""How often a call is tried whose process dies, since it may have been ended from outside."""

# A process without a call for so long ends. Another is started when needed.
_IDLE_S = 300.0

# How long a process may take to end all that it has started.
_END_S = 10.0

# Processes share the cores, so each has one thread. The caller's own settings override this.
_ONE_THREAD = dict.fromkeys(
    ("MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)


# In a process that answers calls: the stream to its parent, which `_serve` puts in. The threads of
# a function take turns, so that no two messages are mixed.
_answer_stream: list[BinaryIO] = []
_stream_lock = threading.Lock()


def tell(message: object) -> None:
    """Send the parent a message, a tuple, before the answer: for functions that processes run."""
    with _stream_lock:
        pickle.dump(message, _answer_stream[0])
        _answer_stream[0].flush()


def call_in_file(file: str, name: str, *args: Any) -> Any:
    """Call a function of a file, without the packages that the file is in: they take seconds."""
    return runpy.run_path(file)[name](*args)


class DiedError(Exception):
    """The process of a call ended without an answer. The message says how."""


class AnswerError(SolverError):
    """What a call returned or raised cannot be pickled. Its process goes on."""


def in_processes(
    function: Callable[[T], R], items: Iterable[tuple[int, T]], jobs: int, processes: Processes
) -> Iterator[tuple[int, R]]:
    """Yield numbered items' results as they come, from ``jobs`` threads that call processes."""
    # The processes are ended first, so that the threads that wait for them end too.
    with ThreadPoolExecutor(jobs) as threads, closing(processes):
        for number, future in unordered(threads, function, items, lambda: jobs):
            yield number, future.result()


def unordered(
    executor: Executor,
    function: Callable[[T], R],
    items: Iterable[tuple[int, T]],
    max_running: Callable[[], int],
) -> Iterator[tuple[int, Future[R]]]:
    """Yield numbered items' finished futures, with at most ``max_running()`` of them handed out.

    The next item is handed out on demand, so a caller that is killed loses only what was running.
    The limit is asked for each time, since the workers of a cluster come and go.
    """
    waiting = iter(items)
    running: dict[Future[R], int] = {}
    while True:
        for number, item in islice(waiting, max(0, max_running() - len(running))):
            running[executor.submit(function, item)] = number
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future


class Processes:
    """One process for each thread that calls; what each does first is to call ``initialize``."""

    def __init__(self, initialize: Callable[[], object] = os.getpid) -> None:
        self._initialize = initialize
        self._of_threads: dict[int, Process] = {}
        self._closed = False

    def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call a function in the thread's process: return what it returns, raise what it raises.

        If the process dies in every attempt, this is a `DiedError`.
        """
        for _ in range(ATTEMPTS):
            process = None  # and stays so if `_process` cannot start one
            try:
                process = self._process()
                result: R = process.ask(function, *args)
                return result
            except KeyboardInterrupt:
                if process is not None:
                    process.end()  # or its answer would be taken for that of the next call
                raise
            except DiedError as error:
                died = error

        if self._closed:  # then `close` ended the process, and not the call
            raise OptschedError("the work has ended")
        if process is None:
            raise SolverError(f"a process for trials does not start: it {died}")

        raise DiedError(f"its process {died}, {ATTEMPTS} times")

    def _process(self) -> Process:
        """Return the process of the calling thread, and start one if it has none."""
        thread = threading.get_ident()
        process = self._of_threads.get(thread)
        if process is not None and process.alive():
            return process

        process = self._of_threads[thread] = Process()
        try:
            if self._closed:  # `close` may have gone through the processes before this one was in
                raise OptschedError("the work has ended")

            process.ask(self._initialize)
        except BaseException:
            process.end()  # or each further call would leave a process behind
            raise

        return process

    def close(self) -> None:
        """End the processes and the calls that they run."""
        self._closed = True
        for process in list(self._of_threads.values()):
            process.end()


class Process:
    """A process that answers the calls that go through its stdin, in the order of the calls.

    `quiet`: whether what it prints is lost. `inherited`: file descriptors that it gets.
    """

    def __init__(self, *, quiet: bool = False, inherited: Sequence[int] = ()) -> None:
        # The process imports from where this one does: -P adds no folder, and an empty path is the
        # current one.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**_ONE_THREAD, **os.environ, "PYTHONPATH": paths}
        if UNKEPT:  # the caller was warned already, and need not be for each process
            environment["PYTHONWARNINGS"] = f"ignore:{LOST}"

        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                # Ctrl-C is for the parent. A process group of its own can be ended as a whole, with
                # the processes of the solvers.
                start_new_session=True,
                pass_fds=inherited,
                env=environment,
            )
        except OSError as error:
            raise SolverError(f"found no way to start {sys.executable}: {error}") from error

        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls, self._answers = self._process.stdin, self._process.stdout

    def alive(self) -> bool:
        """Return whether it has not ended."""
        return self._process.poll() is None

    def ask(
        self, *call: Any, on_message: Callable[[tuple[Any, ...]], object] = lambda message: None
    ) -> Any:
        """Return the answer to a call: a function, and then its arguments.

        `on_message` is called with each message that the function sends before (`tell`).
        """
        self.send(*call)
        # Messages are tuples. The answer is bytes, or a text that says why it cannot be pickled.
        while isinstance(answer := self._next(), tuple):
            on_message(answer)

        if isinstance(answer, str):
            raise AnswerError(answer)

        # Pickled twice as well: one that cannot be read leaves the next answers where they are.
        try:
            value, raised = pickle.loads(answer)
        except Exception as error:
            raise AnswerError(
                f"a process's answer cannot be unpickled: {in_words(error)}"
            ) from None

        if raised is not None:
            raise raised

        return value

    def send(self, *call: Any) -> None:
        """Send a call whose answer is not read: the process is for no `ask` from then on."""
        # Pickled twice, so that only the call fails if its function cannot be imported.
        order = pickle.dumps(call)
        with suppress(OSError, ValueError):  # a process that has ended: `ask` says how
            pickle.dump(order, self._calls)
            self._calls.flush()

    def _next(self) -> Any:
        """Return the next message, or the answer. A stream that ends means that the process did."""
        try:
            return pickle.load(self._answers)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            status = self._process.wait()
            if status >= 0:
                raise DiedError(f"ended with status {status}") from None

            # On Linux the system ends a process by SIGKILL when memory runs out.
            guess = " (out of memory?)" if status == -signal.SIGKILL else ""
            raise DiedError(f"was ended by {signal.Signals(-status).name}{guess}") from None

    def end(self) -> None:
        """End the process and those that it has started."""
        if self.alive() and sys.platform == "linux":
            self._process.terminate()  # it ends the others first (`_supervise`)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        if self.alive():  # on another system, or where it took too long
            with suppress(AttributeError, OSError):  # Windows has no groups of processes
                os.killpg(self._process.pid, signal.SIGKILL)

        with suppress(OSError), self._process:  # it is waited for, and its pipes are closed
            self._process.kill()


def _serve(parent: int) -> None:
    """Answer the calls that come through stdin, until it ends or none comes for long.

    `parent`: the number of the process that calls.
    """
    # The end of stdin is not enough to end with the parent, because compiled code may keep Python
    # from seeing it for hours.
    if sys.platform == "linux":
        _supervise(parent)

    # Answers go through a copy of stdout, and stdout becomes stderr: texts that native code prints
    # there must not get between the answers.
    _answer_stream.append(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    # The parent decides what these signals mean, and this process ends when the parent does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    warnings.formatwarning = lambda text, *_, **__: f"warning: {' '.join(str(text).split())}\n"
    with suppress(OSError):  # when memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")

    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    while True:
        try:
            order = orders.get(timeout=_IDLE_S)
        except queue.Empty:
            # It stays as long as processes live that earlier calls started: they would end, too.
            if not _children_of(os.getpid()):
                os._exit(0)

            continue

        tell(_answer(order))


def _supervise(parent: int) -> None:
    """Fork. The child returns from this call and does the work; this process only watches it.

    It waits for the child's end, ends all that the child has started, and then itself, in the way
    in which the child ended. So it never returns here.

    The end of the parent, or SIGTERM, ends the child. What it has started is found also in another
    group, or if what started it has ended, since this process takes orphans over. It runs no code
    of others, so that nothing keeps it from its task.
    """
    child = 0

    def end_child(number: int, frame: object) -> None:
        if child == 0:  # not forked yet: there is nothing to clear away
            os._exit(1)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_child)
    supervisor = os.getpid()
    adopt_orphans()
    end_with(parent, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        end_with(supervisor)
        return

    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or it would interrupt the clearing away
    end_children()
    if status < 0:  # it was ended by a signal, and the parent shall see by which
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its core, if any
        with suppress(OSError):  # SIGKILL has no other meaning than its own
            signal.signal(-status, signal.SIG_DFL)

        os.kill(supervisor, -status)

    os._exit(abs(status))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the system send this process a signal when its parent ends. Forks do not inherit this."""
    set_death_signal = 1
    _prctl(set_death_signal, number)
    if os.getppid() != parent:  # it ended before this was set, and no signal will come
        os._exit(1)


def adopt_orphans() -> None:
    """Let descendants of this process become its children when their own parents end."""
    set_child_subreaper = 36
    _prctl(set_child_subreaper, 1)


def end_children() -> None:
    """End and await this process's children, and those that it adopts as their parents end."""
    # Each round may bring new children, whose parents it has just ended.
    while children := _children_of(os.getpid()):
        for child in children:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def begin_fork(parent: int, memory_limit: int) -> None:
    """Make this process, a fork, end with its parent and by signals, and limit its memory.

    `memory_limit`: bytes beyond those that it has at its beginning.
    """
    import resource

    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)

    with suppress(OSError, ValueError):  # no /proc, or a lower limit is set already
        # The first word is the size of the address space, which the limit is of.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory_limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _listen(orders: queue.SimpleQueue[bytes]) -> None:
    """Pass on the calls from stdin. The end of stdin ends this process, even during a call."""
    while True:
        try:
            orders.put(pickle.load(sys.stdin.buffer))
        except BaseException:
            os._exit(1)


def _answer(order: bytes) -> bytes | str:
    """Make a call, and pickle what it returned and raised, or say why that cannot be pickled."""
    answer: tuple[Any, BaseException | None]
    try:
        function, *args = pickle.loads(order)
        answer = function(*args), None
    except BaseException as error:
        answer = None, error

    try:
        return pickle.dumps(answer)
    except Exception as error:
        what = "result" if answer[1] is None else in_words(answer[1])
        return f"a process's answer ({what}) cannot be pickled: {in_words(error)}"


def _children_of(process: int) -> list[int]:
    """Return the children of a process, none where the system does not tell."""
    try:
        files = [thread / "children" for thread in Path(f"/proc/{process}/task").iterdir()]
        return [int(child) for file in files for child in file.read_text().split()]
    except OSError:
        return []


def memory_bytes(text: str) -> int:
    """Return the bytes that a text such as ``4GiB``, ``500MB`` or ``1000`` means."""
    # The groups: a number, a prefix or nothing, and an i if the prefix is one of powers of 1024.
    form = r"(\d{0,18}\.?\d{1,18})\s*(?:([kmgt]?)(i?)b)?"
    match = re.fullmatch(form, text.strip(), re.ASCII | re.IGNORECASE)
    value = 0
    if match:
        number, prefix, binary = match.groups()
        # The place of the prefix in this text is the power of 1000 or 1024 that it means.
        power = " kmgt".find((prefix or " ").lower())
        value = int(float(number) * (1024 if binary else 1000) ** power)
    if value < 1:  # less than a byte, or no amount at all
        raise InputError(
            f"--memory-limit: found {text!r}; expected an amount such as 4GiB or 500MB"
        )

    return value


if __name__ == "__main__":
    # The module that functions import, and not this one of the same text, has the way out.
    import_module("optsched.problem.processes")._serve(int(sys.argv[1]))
