"""Processes for calls that may crash: what a call costs beyond itself."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optsched.experiments.engines import on_this_machine
from optsched.experiments.store import code_version
from optsched.problem import errors, processes
from optsched.problem.errors import OptschedError, SolverError, ViolationError
from optsched.problem.processes import AnswerError, DiedError, Processes

Row = dict[str, Any]


class NeedsNumberError(Exception):
    """An error that cannot be made again from its text: that raises what a broken pipe raises."""

    def __init__(self, number: object) -> None:
        if not isinstance(number, int):
            raise ValueError("expected a number")
        super().__init__(f"found {number}")


def needs_number() -> None:
    """Raise an error that cannot be made again from its text."""
    raise NeedsNumberError(3)


def violates() -> None:
    """Raise an error with fields of its own, which must arrive."""
    raise ViolationError("batch 1: too much", rule="kv_capacity", batch=1, value=5.0, limit=4.0)


def makes_function() -> Callable[[], int]:
    """Return what cannot be pickled."""
    return lambda: 1


def started(file: str) -> list[str]:
    """Note this process, and return all that have been noted."""
    with Path(file).open("a") as log:
        log.write(f"{os.getpid()}\n")
    return Path(file).read_text().split()


def refuses(file: str) -> None:
    """Note this process and refuse to start, as other code than expected does."""
    started(file)
    raise OptschedError("found other code")


def dies(file: str, times: int) -> None:
    """End with status 3 the first so many times."""
    if len(started(file)) <= times:
        os._exit(3)


def trial(row: Row) -> Row:
    """Return the row, but of k = 0 what cannot be pickled."""
    return row if row["k"] else {"k": makes_function()}


@pytest.fixture
def own() -> Iterator[Processes]:
    """Yield processes that end with the test."""
    with closing(Processes()) as found:
        yield found


def all_errors() -> Iterator[OptschedError]:
    """Yield one of each kind of error of the package."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, OptschedError):
            given = {"rule": "kv", "batch": 1, "request": 2, "value": 3.5, "limit": 3.0}
            yield kind("one line", **given if issubclass(kind, ViolationError) else {})


@pytest.mark.parametrize("error", list(all_errors()), ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: OptschedError) -> None:
    error.add_note("of its own")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == ("one line", vars(error))


def test_an_answer_that_cannot_be_pickled_costs_one_call(own: Processes) -> None:
    first = own.call(os.getpid)
    with pytest.raises(AnswerError, match=r"result.* cannot be pickled"):
        own.call(makes_function)
    with pytest.raises(AnswerError, match="cannot be unpickled:"):
        own.call(needs_number)
    with pytest.raises(ViolationError, match="batch 1: too much") as caught:
        own.call(violates)
    # The fields that `violates` gives its error.
    assert (caught.value.rule, caught.value.value, caught.value.limit) == ("kv_capacity", 5.0, 4.0)
    # The next answers are those of the next calls, from the same process.
    assert [own.call(abs, k) for k in (-1, -2)] == [1, 2]
    assert own.call(os.getpid) == first


def test_a_trial_whose_result_cannot_be_pickled_has_failed() -> None:
    todo = {k: {"k": k} for k in range(2)}
    found = dict(on_this_machine(trial, todo, 1, code_version()))
    assert "cannot be pickled" in str(found[0][1])
    assert found[1][:2] == ({"k": 1}, None)


def test_a_refused_start_leaves_no_process(tmp_path: Path) -> None:
    """`refuses` notes its process and raises an error, which arrives; the process is gone."""
    file = tmp_path / "started"
    with closing(Processes(partial(refuses, str(file)))) as own:
        for _ in range(2):
            with pytest.raises(OptschedError, match="found other code"):
                own.call(abs, 1)
        for process in file.read_text().split():
            with pytest.raises(ProcessLookupError):
                os.kill(int(process), 0)


def test_a_process_that_dies_while_it_starts_is_tried_again(tmp_path: Path) -> None:
    """One start ends with status 3 once, and the other each time, ATTEMPTS times."""
    with closing(Processes(partial(dies, str(tmp_path / "once"), 1))) as own:
        assert own.call(abs, -1) == 1
    with (
        closing(Processes(partial(dies, str(tmp_path / "always"), 9))) as own,
        pytest.raises(SolverError, match=r"does not start:.*status 3"),
    ):
        own.call(abs, -1)
    assert len((tmp_path / "always").read_text().split()) == processes.ATTEMPTS


def test_a_process_that_dies_in_a_call_is_replaced(own: Processes) -> None:
    with pytest.raises(DiedError, match=r"status 7.*2"):
        own.call(os._exit, 7)
    assert own.call(abs, -1) == 1


def test_the_end_of_the_calls_ends_a_process_in_a_call() -> None:
    # Where the system does not end it with its parent, here because the parent lives on.
    words = [sys.executable, "-m", processes.__name__, str(os.getpid())]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(pickle.dumps((time.sleep, 600))))
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    assert process.stdout is not None
    assert process.stdout.read() == b""


def leaves_others(file: str, how: str) -> None:
    """Leave a process in a group of its own whose parent has ended, then go on for long or end."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        started(file)
        time.sleep(600)
    started(file)
    while how != "return" and len(Path(file).read_text().split()) < 2:
        time.sleep(0.05)
    if how == "die":
        os._exit(3)
    if how == "last":
        time.sleep(600)


# A program with a pool whose only call leaves another process behind and sleeps.
CALLS = """
import sys
sys.path.insert(0, {tests!r})
from test_processes import leaves_others
from optsched.problem.processes import Processes, in_processes
calls = Processes()
call = lambda file: calls.call(leaves_others, file, "last")
if __name__ == "__main__":
    list(in_processes(call, [(0, {file!r})], 1, calls))
"""


def wait_for(file: Path, count: int) -> list[int]:
    """Wait until so many processes have noted themselves, and return them."""
    while not file.exists() or len(file.read_text().split()) < count:
        time.sleep(0.05)
    return [int(one) for one in file.read_text().split()]


def runs(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def all_end(every: list[int]) -> None:
    while any(map(runs, every)):
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parents")
@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        *(pytest.param(s, marks=pytest.mark.whole) for s in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_nothing_outlives_a_pool_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    """`CALLS` runs `leaves_others`: its process and one that it leaves in a group of its own would
    both sleep for 600 s, and end with the pool."""
    file = tmp_path / "started"
    code = CALLS.format(tests=str(Path(__file__).parent), file=str(file))
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    found = wait_for(file, 2)
    parent.send_signal(how)
    parent.wait(60)
    all_end(found)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parents")
@pytest.mark.parametrize("how", ["return", "die"])
def test_what_a_call_leaves_behind_ends_with_its_process(tmp_path: Path, how: str) -> None:
    """A call leaves a process in a group of its own, and returns or dies (twice, with status 3);
    what it left ends when the pool is closed."""
    file = tmp_path / "started"
    with closing(Processes()) as own:
        if how == "die":
            with pytest.raises(DiedError, match=r"status 3.*2"):
                own.call(leaves_others, str(file), how)
        else:
            own.call(leaves_others, str(file), how)
        found = wait_for(file, 2)
    all_end(found)


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next(own: Processes) -> None:
    assert own.call(abs, -1) == 1
    number = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        own.call(time.sleep, 2)
    signal.signal(signal.SIGALRM, number)
    assert own.call(abs, -5) == 5
