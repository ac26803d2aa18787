"""Run trials: in this process, in others of this machine, or on a Dask cluster.

joblib's Dask engine is not used. It waits for ever for a task that Dask gave up, and where the
cluster has one worker it runs the trials in this process.
"""

import pickle
import signal
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from optsched.experiments.base import Row, Run
from optsched.experiments.registry import load_studies
from optsched.experiments.store import code_version
from optsched.problem.errors import InputError, OptschedError, UsageError, in_words
from optsched.problem.processes import AnswerError, DiedError, Processes, in_processes, unordered

Answer = tuple[Row | None, str | None, float]
"""The result of a trial or why it has none, and the seconds that it took."""

Answers = Generator[tuple[int, Answer]]
"""Numbers of trials and their answers, in the order in which trials finish."""

_CONNECT_S = 10.0


def on_this_machine(run: Run, todo: Mapping[int, Row], jobs: int, code: str) -> Answers:
    """Run trials in ``jobs`` processes that run the version ``code``; with 0 in this one."""
    if jobs == 0:
        yield from ((number, attempt(run, trial)) for number, trial in todo.items())
        return

    processes = Processes(partial(_check_code, code))
    yield from in_processes(partial(_run_beside, processes, run), todo.items(), jobs, processes)


def on_dask(
    run: Run, todo: Mapping[int, Row], jobs: int, code: str, scheduler: str | None
) -> Answers:
    """Run trials on a Dask cluster, each in a process that its worker starts.

    `todo`: the trials by number. `code`: the version of the code that workers must have.
    Without a scheduler's address a cluster of ``jobs`` workers is started. A trial that has lost
    four workers (``distributed.scheduler.allowed-failures``) is recorded as failed.
    """
    if find_spec("distributed") is None:
        raise UsageError("engine: dask needs the package dask[distributed]; install it")

    worker_died: type[Exception] = import_module("distributed.scheduler").KilledWorker
    function = partial(_on_worker, pickle.dumps(run), code)
    with _cluster(jobs, scheduler) as client:

        def max_asked() -> int:
            # One more trial for each thread of the cluster, so that none waits for the network.
            return 2 * max(1, sum(client.ncores().values()))

        # Without `pure` equal trials are calls of their own.
        try:
            futures = unordered(client.get_executor(pure=False), function, todo.items(), max_asked)
            for number, future in futures:
                try:
                    yield number, future.result()
                except worker_died:
                    # No result, why there is none, and 0 seconds, as nobody has measured them.
                    yield number, (None, "the Dask workers that ran it died", 0.0)
        except OptschedError:
            raise
        except Exception as error:
            raise InputError(
                f"--engine dask: the cluster has failed ({in_words(error)}); finished trials are "
                "stored, and the same command goes on with the others"
            ) from None


def attempt(run: Run, trial: Row) -> Answer:
    """Run a trial in this process.

    `InputError` and `UsageError` refuse the experiment. Any other exception is a failed trial.
    """
    begin = time.perf_counter()
    try:
        return run(trial), None, time.perf_counter() - begin
    except (InputError, UsageError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return None, in_words(error), time.perf_counter() - begin


def _run_beside(processes: Processes, run: Run, trial: Row) -> Answer:
    """Run a trial in the process that serves this thread.

    A trial whose process dies, or that gives no answer, has failed.
    """
    begin = time.perf_counter()
    try:
        return processes.call(attempt, run, trial)
    except (AnswerError, DiedError) as error:
        reason = str(error)
    # The experiment is refused, no process starts, or the work has ended: no trial can run.
    except OptschedError:
        raise
    except Exception as error:  # its process cannot import the function
        reason = in_words(error)

    return None, reason, time.perf_counter() - begin


def _check_code(code: str) -> None:
    """Prepare a process for trials, and check that it has the code of this one."""
    load_studies()  # or their functions could not be unpickled
    if code_version() != code:
        raise OptschedError(
            f"found optsched {code_version()} in a process for trials; expected {code}, the same "
            "code in all processes and unchanged while they run"
        )


@cache
def _processes(code: str) -> Processes:
    """Return the processes for trials of this Dask worker, which it keeps from trial to trial."""
    return Processes(partial(_check_code, code))


def _on_worker(packed: bytes, code: str, trial: Row) -> Answer:
    """Run a trial in a process beside this Dask worker.

    ``packed`` is the function, pickled here and not by Dask, since a worker must load the studies
    before it can unpickle one of theirs.
    """
    load_studies()
    return _run_beside(_processes(code), pickle.loads(packed), trial)


@contextmanager
def _cluster(jobs: int, scheduler: str | None) -> Iterator[Any]:
    """Yield a client of a running Dask cluster, or of a cluster that is started here."""
    distributed: Any = import_module("distributed")
    address: Any = scheduler
    with ExitStack() as stack:
        if scheduler is None:
            with _ignore_ctrl_c():
                # 50 is the level of critical messages, so that no others are shown.
                address = distributed.LocalCluster(
                    n_workers=jobs, threads_per_worker=1, dashboard_address=None, silence_logs=50
                )

            stack.enter_context(address)

        try:
            client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--scheduler: found no Dask scheduler at {scheduler!r} "
                f"({type(error).__name__}); expected the address that `dask scheduler` prints"
            ) from None

        stack.enter_context(client)
        try:
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except TimeoutError:
            raise UsageError(
                f"--scheduler: found no workers at {scheduler!r}; start `dask worker` first"
            ) from None

        yield client


@contextmanager
def _ignore_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C while processes start: they inherit that, and leave Ctrl-C to this process."""
    # Python sets signals in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
