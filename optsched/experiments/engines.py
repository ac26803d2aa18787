"""Engines that run trials: in this process, in other processes of this machine, or on Dask.

Threads of concurrent.futures ask the other processes or the cluster, in one loop. A trial is handed
out only when an earlier one has been stored. joblib's engines are not used. In its pool of
processes a crash breaks the other trials too (see `optsched.experiments.isolation`). Its Dask
engine waits for ever for a task that Dask gave up, and where the cluster has one worker it runs the
trials in this process.
"""

from __future__ import annotations

import pickle
import signal
import threading
from asyncio import CancelledError
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from optsched.experiments.base import Row, Run
from optsched.experiments.isolation import Answer, Isolation, attempt
from optsched.experiments.registry import load_studies
from optsched.problem.errors import InputError, OptschedError, UsageError

MAX_JOBS = 1024

Answers = Generator[tuple[int, Answer]]
"""Numbers of trials and their answers, in the order in which trials finish.

The next trial is handed out when the caller asks for the next answer. A caller that stores each
answer at once and is then killed loses only the trials that were running.
"""

_CONNECT_S = 10.0


def in_this_process(run: Run, todo: Mapping[int, Row]) -> Answers:
    """Run one trial after the other in this process, where a crash ends the experiment."""
    for number, trial in todo.items():
        yield number, attempt(run, trial)


def in_processes(
    run: Run, todo: Mapping[int, Row], *, jobs: int, code: str, memory_limit: int | None = None
) -> Answers:
    """Run trials in ``jobs`` processes of this machine; see `Isolation` for the other arguments."""
    # The processes are ended first, so that the threads that wait for them end too.
    with ThreadPoolExecutor(jobs) as threads, Isolation(code, memory_limit) as isolation:
        yield from _answers(threads, lambda trial: isolation.run(run, trial), todo, lambda: jobs)


def on_dask(
    run: Run,
    todo: Mapping[int, Row],
    *,
    jobs: int,
    code: str,
    memory_limit: int | None = None,
    scheduler: str | None = None,
) -> Answers:
    """Run trials on a Dask cluster, each in a process that its worker starts.

    Without the address of a scheduler a cluster of ``jobs`` workers is started. When a worker is
    lost, others run its trials. Dask gives up a trial that has lost four workers
    (``distributed.scheduler.allowed-failures``), and the trial is then recorded as failed.
    """
    if find_spec("distributed") is None:
        raise UsageError("engine: dask needs the package dask[distributed]; install it")

    distributed: Any = import_module("distributed")

    def ask(trial: Row) -> Answer:
        try:
            future = client.submit(
                _beside_worker, pickle.dumps(run), trial, code, memory_limit, pure=False
            )
            answer: Answer = future.result()
            return answer
        except distributed.scheduler.KilledWorker:
            return "failed", "the Dask workers that ran it died", 0.0

    def room() -> int:
        # One more trial for each thread of the cluster, so that none waits for the network.
        return 2 * max(1, sum(client.ncores().values()))

    # The cluster is closed first, so that the threads that wait for it end.
    with ThreadPoolExecutor(2 * MAX_JOBS) as threads, _cluster(jobs, scheduler) as client:
        try:
            yield from _answers(threads, ask, todo, room)
        except OptschedError:
            raise
        except (Exception, CancelledError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"--engine dask: the cluster has failed ({text}); finished trials are stored, and "
                "the same command goes on with the others"
            ) from None


def _answers(
    threads: Executor,
    ask: Callable[[Row], Answer],
    todo: Mapping[int, Row],
    room: Callable[[], int],
) -> Answers:
    left = iter(todo.items())
    asked: dict[Future[Answer], int] = {}
    while True:
        for number, trial in islice(left, max(0, room() - len(asked))):
            asked[threads.submit(ask, trial)] = number
        if not asked:
            return
        for future in wait(asked, return_when=FIRST_COMPLETED).done:
            yield asked.pop(future), future.result()


@contextmanager
def _cluster(jobs: int, scheduler: str | None) -> Iterator[Any]:
    """Yield a client of a running Dask cluster, or of a cluster that is started here."""
    distributed: Any = import_module("distributed")
    with ExitStack() as stack:
        address: Any = scheduler
        if scheduler is None:
            with _ctrl_c_ignored():
                cluster = distributed.LocalCluster(
                    n_workers=jobs, threads_per_worker=1, dashboard_address=None, silence_logs=50
                )

            address = stack.enter_context(cluster)

        try:
            client = stack.enter_context(
                distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
            )
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--scheduler: found no Dask scheduler at {scheduler!r} "
                f"({type(error).__name__}); expected the address that `dask scheduler` prints"
            ) from None

        try:
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except TimeoutError:
            raise UsageError(
                f"--scheduler: found no workers at {scheduler!r}; start `dask worker` first"
            ) from None

        yield client


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Ignore Ctrl-C while processes start: they inherit that, and leave Ctrl-C to this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@cache
def _isolation(code: str, memory_limit: int | None) -> Isolation:
    return Isolation(code, memory_limit)


def _beside_worker(packed: bytes, trial: Row, code: str, memory_limit: int | None) -> Answer:
    """Run a trial in a process of its own; the caller is a Dask worker."""
    load_studies()  # or their functions cannot be unpickled
    return _isolation(code, memory_limit).run(pickle.loads(packed), trial)
