"""Where trials run: in this process, in processes beside it, or on a Dask cluster."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from optsched.experiments.isolation import Answer, Isolation, Row, attempt
from optsched.problem.errors import InputError, OptschedError, UsageError

Finished = Generator[int]
"""Numbers of trials that have finished and whose answers are kept, as they come."""

Keep = Callable[[int, Answer], None]
"""Makes an answer durable; called in any thread, so that none goes on before it is done."""

_CONNECT_S = 10.0


def in_this_process(run: Callable[[Row], Row], todo: Mapping[int, Row], keep: Keep) -> Finished:
    """Run one trial after the other here: a crash ends the experiment."""
    for number, trial in todo.items():
        keep(number, attempt(run, trial))
        yield number


def in_processes(
    run: Callable[[Row], Row],
    todo: Mapping[int, Row],
    keep: Keep,
    *,
    jobs: int,
    code: str,
    memory_limit: int | None = None,
) -> Finished:
    """Run trials in processes of this machine.

    Parameters
    ----------
    run : callable
    todo : mapping
        Trials by number.
    keep : callable
    jobs : int
        How many processes.
    code : str
        The version of the code that they must run.
    memory_limit : int, optional
        Bytes per process.

    Raises
    ------
    UsageError
        More than one job without joblib; a memory limit where there can be none.
    """
    if jobs > 1 and find_spec("joblib") is None:
        raise UsageError("jobs: more than 1 needs the package joblib; install it, or use 1")
    with Isolation(code, memory_limit) as isolation:

        def one(number: int, trial: Row) -> int:
            keep(number, isolation.run(run, trial))
            return number

        if jobs == 1:
            for number, trial in todo.items():
                yield one(number, trial)
            return
        joblib: Any = import_module("joblib")
        # One trial to a batch: a trial that waits for others of its batch would not be durable.
        pool = joblib.Parallel(
            n_jobs=jobs, backend="threading", batch_size=1, return_as="generator_unordered"
        )
        answers = pool(joblib.delayed(one)(number, trial) for number, trial in todo.items())
        try:
            yield from answers
        finally:
            isolation.close()  # or joblib would wait for the trials that run


def on_dask(
    run: Callable[[Row], Row],
    todo: Mapping[int, Row],
    keep: Keep,
    *,
    jobs: int,
    code: str,
    memory_limit: int | None = None,
    scheduler: str | None = None,
) -> Finished:
    """Run trials on a Dask cluster, each in a process beside the worker's.

    A worker that is lost has its trials run by others; Dask gives a trial up when it has lost
    four workers (``distributed.scheduler.allowed-failures``), and then the trial has failed.
    joblib's Dask engine is not used: it waits for ever for a task that was given up, and runs
    the trials in this process where the cluster has one worker.

    Parameters
    ----------
    run, todo, keep, code, memory_limit
        As for `in_processes`.
    jobs : int
        Workers of the cluster that is started where no scheduler is given.
    scheduler : str, optional
        Address of a running cluster; all its workers are used.

    Raises
    ------
    UsageError
        No package dask[distributed]; no such scheduler, or no workers there.
    InputError
        The cluster is lost, or its workers have other code.
    """
    if find_spec("distributed") is None:
        raise UsageError("engine: dask needs the package dask[distributed]; install it")
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
                f"--scheduler: no Dask scheduler answers at {scheduler!r} "
                f"({type(error).__name__}); the address that `dask scheduler` prints is right"
            ) from None
        try:
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except TimeoutError:
            raise UsageError(
                f"--scheduler: {scheduler!r} has no workers; start `dask worker` first"
            ) from None
        yield from _through(client, distributed, run, todo, keep, code, memory_limit)


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Start processes that leave Ctrl-C to this one: they inherit what is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _through(
    client: Any,
    distributed: Any,
    run: Callable[[Row], Row],
    todo: Mapping[int, Row],
    keep: Keep,
    code: str,
    memory_limit: int | None,
) -> Finished:
    left = iter(todo.items())
    running: dict[Any, int] = {}
    answers = distributed.as_completed(loop=client.loop)

    def feed() -> None:
        # A trial more than there are threads for each, so that none waits for the network.
        room = 2 * max(1, sum(client.ncores().values())) - len(running)
        for number, trial in islice(left, max(0, room)):
            future = client.submit(_remote, run, trial, code, memory_limit, pure=False)
            running[future.key] = number
            answers.add(future)

    try:
        feed()
        for future in answers:
            number = running.pop(future.key)
            # Not its status: a result may be lost with its worker while it is on its way, and
            # then this waits until another worker has it.
            try:
                answer = future.result()
            except distributed.scheduler.KilledWorker:
                answer = ("failed", "the Dask workers that ran it died", 0.0)
            except OptschedError:
                raise
            except Exception as error:
                raise _lost(error) from None
            keep(number, answer)
            feed()
            yield number
    except OSError as error:
        raise _lost(error) from None
    finally:
        with suppress(Exception):
            client.cancel(list(answers.futures))


def _lost(why: Exception) -> InputError:
    text = " ".join(f"{type(why).__name__}: {why}".split())
    return InputError(
        f"--engine dask: the cluster does not go on ({text}); what has finished is stored, and "
        "the same command goes on with the rest"
    )


_here: dict[tuple[str, int | None], Isolation] = {}
_one_at_a_time = threading.Lock()


def _remote(run: Callable[[Row], Row], trial: Row, code: str, memory_limit: int | None) -> Answer:
    """Run a trial beside the Dask worker that this is."""
    with _one_at_a_time:
        isolation = _here.setdefault((code, memory_limit), Isolation(code, memory_limit))
    return isolation.run(run, trial)
