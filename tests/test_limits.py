"""Time limits, Ctrl-C and memory hold while anything runs, not only inside a solver.

Limits are of processor time and memory, with much to spare on a slow machine; commands run in
processes of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest

from optsched import Instance, Problem, compare, evaluate, run, solve
from optsched.costs.load import cost_for
from optsched.files.read_write import read_instance, write_instance
from optsched.optimize.formulations import get
from optsched.optimize.formulations.base import Task
from optsched.optimize.formulations.rounds.hindsight import solve_by_highs
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.policies import list_policies
from optsched.policies.base import Batch, View
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget, work_time
from optsched.problem.errors import (
    InputError,
    LoopError,
    OutOfTimeError,
    PolicyError,
    TooLargeError,
)
from optsched.workloads.predict import predict

MODEL = "llama2-7b-a100-infermax"
LIMIT_S, MAX_S = 2, 24.0
"""The limit of a command, and the processor time that it may take with two threads."""
HANGS_S, COMPILING_S = 150.0, 600.0
"""How long a command is waited for on a busy machine."""
MAX_BYTES = 3 * 2**30


class Ended(NamedTuple):
    """How a command ended, with the processor time and the memory that it took."""

    status: int
    seconds: float
    bytes: int
    out: str
    err: str


def timed(folder: Path, *words: object) -> Ended:
    """Run a command in a process of its own; end it if it takes very much too long."""
    begin = time.monotonic()
    with open(folder / "out", "w+") as out, open(folder / "err", "w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "optsched", *map(str, words)], cwd=folder, stdout=out, stderr=err
        )
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            err.seek(0)
            late = time.monotonic() - begin
            if late > (COMPILING_S if "compiling" in err.read() else HANGS_S):
                process.kill()
            time.sleep(0.05)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        seconds = usage.ru_utime + usage.ru_stime
        return Ended(process.returncode, seconds, 1024 * usage.ru_maxrss, out.read(), err.read())


def spread(n: int, outputs: int, *, seconds: bool, together: bool = False) -> Instance:
    """Return requests of random sizes with little room, so that every model of them is large."""
    rng = np.random.default_rng(7)
    arrival = np.zeros(n) if together else np.sort(rng.uniform(0, n / 40 if seconds else n, n))
    output = rng.integers(1, outputs + 1, n)
    prompt = rng.integers(1, 6, n)
    return Instance(
        arrival if seconds else arrival.astype(int),
        prompt,
        output,
        int((prompt + output).max()) + 10,
        time_unit="second" if seconds else "round",
    )


LARGE = {
    "rounds": spread(100, 500, seconds=False),
    "seconds": spread(60, 25, seconds=True),
    "together": spread(60, 25, seconds=True, together=True),
}
"""A hundred requests have some 10^9 nonzeros in the program by start times. Sixty have a CP-SAT
model of 2 x 10^8 terms."""
QUICK = {("seconds", "auto")}
WHOLE = {("rounds", "pulp"), ("seconds", "cpsat"), ("together", "pulp-bigm")}


def table() -> list[object]:
    """Return every method with an instance of LARGE; most of them are slow."""
    rows = []
    for name in LARGE:
        formulation = "hindsight" if name == "rounds" else "infermax"
        for method in ("auto", *get(formulation).methods):
            mark = pytest.mark.whole if (name, method) in WHOLE else pytest.mark.slow
            rows.append(pytest.param(name, method, marks=() if (name, method) in QUICK else mark))
    return rows


@pytest.mark.parametrize(("name", "method"), table())
def test_every_method_answers_or_refuses_within_its_limits(
    tmp_path: Path, name: str, method: str
) -> None:
    # Of LARGE. Statuses: 0 an answer, 2 refused, 4 no schedule in time. Compiling is not counted.
    write_instance(LARGE[name], tmp_path / "large.json")
    costs = () if name == "rounds" else ("--cost-model", MODEL)
    words = ("--method", method, "--time-limit", LIMIT_S, "--threads", 2, *costs)
    ended = timed(tmp_path, "solve", "large.json", *words)
    assert ended.status in (0, 2, 4), ended
    assert "Traceback" not in ended.err
    assert method != "auto" or ended.status == 0, ended
    assert ended.bytes < MAX_BYTES, ended
    if "compiling" not in ended.err:
        assert ended.seconds < MAX_S, ended


COMMANDS = (
    ("solve",),
    ("bound",),
    ("compare",),
    ("capacity", "--slo-ttft", "5", "--search", "0"),
    ("export", "--format", "lp", "-o", "out.lp"),
)
HUGE = {
    # What is huge is a number, not the input: three requests each.
    "capacity": {"kv_capacity": 10**12},
    "outputs": {"output_tokens": [10**9, 3, 10**9], "kv_capacity": 2 * 10**9},
    "long outputs": {"output_tokens": [10**7, 3, 10**7], "kv_capacity": 10**7 + 9},
    "prompts": {"prompt_tokens": [10**9, 1, 10**9], "kv_capacity": 2 * 10**9},
    "arrivals": {"arrival": [0, 10**12, 3 * 10**12]},
}


def huge(name: str, unit: str) -> Instance:
    """Return three requests of 1 + 5 tokens with one of the numbers of HUGE instead."""
    columns = {
        "arrival": [0, 1, 2],
        "prompt_tokens": [1, 1, 1],
        "output_tokens": [5, 5, 5],
        "kv_capacity": 20,
        "time_unit": unit,
    }
    return Instance(**{**columns, **HUGE[name]})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["round", "second"])
@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_no_command_works_in_proportion_to_a_number(
    tmp_path: Path, words: tuple[str, ...], name: str, unit: str
) -> None:
    """On HUGE each command ends within MAX_S and MAX_BYTES.

    Statuses: 0 an answer, 2 refused, 3 infeasible, 4 no schedule in time. Compiling is not counted.
    """
    write_instance(huge(name, unit), tmp_path / "huge.json")
    limit = () if words[0] == "export" else ("--time-limit", "5")
    costs = () if unit == "round" else ("--cost-model", MODEL)
    ended = timed(tmp_path, words[0], "huge.json", *words[1:], *limit, *costs)
    assert ended.status in (0, 2, 3, 4), ended
    assert "Traceback" not in ended.err
    assert ended.bytes < MAX_BYTES, ended
    if "compiling" not in ended.err:
        assert ended.seconds < MAX_S, ended


@pytest.mark.parametrize("name", ["capacity", "prompts", "arrivals"])
def test_every_policy_takes_time_in_proportion_to_requests_and_tokens(name: str) -> None:
    # Three requests of 5 output tokens, 15 in all, so a policy makes some dozens of batches.
    instance = huge(name, "round")
    for policy in list_policies():
        try:
            schedule = simulate(instance, policy, budget=Budget(MAX_S))
        except (LoopError, PolicyError):
            continue  # it needs SLOs, or never ends, whatever the numbers are
        # An output of 5 tokens takes 5 rounds.
        assert evaluate(instance, schedule).metrics["makespan"] >= 5


def test_the_kv_sum_of_a_geometric_pipeline_is_that_of_its_terms() -> None:
    # The sum over m = 1 .. wide of the KV of prompt + ceil(length m / wide) - 1 tokens, term by
    # term, is what the closed form `_held` gives. A view of blocks and offset alone counts KV.
    from optsched.policies.geometric import _held

    rng = np.random.default_rng(3)
    for _ in range(300):
        prompt, wide = int(rng.integers(1, 60)), int(rng.integers(1, 200))
        length, block, offset = 2 ** int(rng.integers(0, 9)), int(rng.integers(1, 20)), 1
        view = View.__new__(View)
        object.__setattr__(view, "kv_block_tokens", block)
        object.__setattr__(view, "kv_offset", offset)
        terms = [view.kv_of(prompt + -(-length * m // wide) - 1) for m in range(1, wide + 1)]
        assert _held(view, prompt, length, wide) == sum(terms)


def test_geometric_policies_serve_three_requests_whatever_the_capacity() -> None:
    # With room for all, gba runs the three of 5 tokens side by side: 3 x 5 = 15 rounds. gsa runs
    # them for 1, 2 and 4 tokens in vain and then to the end: 3 x (1 + 2 + 4 + 5) = 36 rounds.
    for capacity in (10**4, 10**9, 10**15):
        instance = Instance([0, 0, 0], [1, 1, 1], [5, 5, 5], capacity)
        assert run(instance, "gba").metrics["tel"] == 15
        assert run(instance, "gsa").metrics["tel"] == 36


# Policies


class Slow:
    """Runs one request at a time, and thinks about each batch."""

    def batch(self, view: View) -> Batch:
        time.sleep(0.01)
        chosen = (view.running or view.waiting)[0]
        return Batch({chosen: view.rest(chosen)})


@pytest.mark.parametrize("policy", ["fcfs", "vllm-v1", "trail", "isrtf", Slow()])
def test_a_policy_stops_at_the_end_of_its_budget(policy: object) -> None:
    """Compiled loops, ELIS's windows and a policy of one's own that takes 10 ms for a batch."""
    # Twenty million batches, one after the other.
    instance = Instance([0, 1], [1, 1], [10**7, 10**7], 10**7 + 5)
    begin = time.monotonic()
    with pytest.raises(OutOfTimeError, match=r"time limit while policy '.*' ran"):
        simulate(instance, policy, budget=Budget(0.05))  # type: ignore[arg-type]
    assert time.monotonic() - begin < COMPILING_S


class Hangs:
    """Decides once, and then never again; it even catches what it is interrupted with."""

    def __init__(self) -> None:
        self.caught = 0

    def batch(self, view: View) -> Batch:
        if view.waiting:
            return Batch({0: 1})
        while self.caught < 2:
            try:
                while True:
                    pass
            except Exception:
                self.caught += 1
        return Batch({0: 1})


def test_a_policy_that_hangs_ends_with_the_time_and_at_ctrl_c() -> None:
    """`Hangs` never decides again after its first batch. The caller's signals stay as they were."""
    instance, stop = Instance([0], [1], [9], 99), threading.Event()
    before, begin = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(OutOfTimeError, match="'Hangs'"):
        simulate(instance, Hangs(), budget=Budget(0.2))
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(OutOfTimeError, match="'Hangs'"):
        simulate(instance, Hangs(), budget=Budget(stop=stop))
    assert time.monotonic() - begin < COMPILING_S
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    hangs, fine = compare(instance, [Hangs(), "fcfs"], time_limit_s=0.4, bound=False).rows
    assert hangs.error == "time limit while policy 'Hangs' ran"
    assert fine.metrics is not None


def test_a_timer_of_the_caller_ends_a_policy_and_goes_on_as_set() -> None:
    class Alarmed(Exception): ...

    def hang() -> None:
        while True:
            pass

    def ring(number: int, frame: object) -> None:
        raise Alarmed

    before = signal.signal(signal.SIGALRM, ring)
    try:
        # A budget sets no timer while one runs: the caller's rings once, after 0.3 s, and then
        # stands at (0, 0).
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarmed), Budget(60.0).watching("policy 'Hangs' ran"):
            hang()
        # An inner budget leaves the outer one's timer alone.
        outer = Budget(0.3)
        with pytest.raises(OutOfTimeError), outer.watching("outer"), Budget(60.0).watching("inner"):
            hang()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("policy", ["fcfs", "vllm-v1", "trail", "isrtf"])
def test_a_policy_that_is_looked_at_decides_the_same(policy: str) -> None:
    # 9000 batches: the loop returns several times to look at the clock. One request after the
    # other in the order of arrival takes 3000, 6000 and 9000 rounds; the window of isrtf is 50
    # tokens, and other orders take as long in all.
    instance = Instance([0, 0, 0], [1, 1, 1], [3000, 3000, 3000], 3001)
    evaluation = run(instance, policy).evaluation
    assert evaluation.metrics["makespan"] >= 9000
    if policy == "fcfs":
        assert evaluation.metrics["tel"] == 18000


def test_a_schedule_that_would_not_fit_into_memory_is_refused() -> None:
    # Outputs of 10^9, 3 and 10^9 tokens.
    with pytest.raises(PolicyError, match=r"found 2e\+09 output tokens.*expected at most"):
        simulate(huge("outputs", "round"), "fcfs")


# Models


def test_all_builders_refuse_what_does_not_fit_into_memory() -> None:
    """LARGE has instances whose models are too large, with the sizes that it says."""
    # 3000 requests are 3000 * 2999 / 2 = 4.5e6 pairs.
    many = Instance(np.zeros(3000, int), np.full(3000, 2), np.ones(3000, int), 3)
    nonzeros = r"found up to .* nonzeros .*; expected at most"
    for instance, method, words in (
        (LARGE["rounds"], "highs", nonzeros),
        (LARGE["rounds"], "pulp", nonzeros),
        (many, "cpsat", r"found up to 4.5e\+06 pairs of requests"),
        (LARGE["seconds"], "cpsat", r"terms in the CP-SAT model of \d+ batches"),
        (LARGE["together"], "pulp-bigm", r"nonzeros in the program of \d+ batches"),
    ):
        model = get("hindsight" if instance.in_rounds else "infermax")
        cost = cost_for(instance, None if instance.in_rounds else MODEL)
        task = Task(instance, cost, ("tel",))
        with pytest.raises(TooLargeError, match=words):
            model.methods[method].run(task, SolveOptions(time_limit_s=2))


def test_a_model_of_phases_counts_too() -> None:
    # All forty start at once. Each has 300,000 rounds in the rows of memory and of phases, which is
    # 2.4 x 10^7; the columns of phases have 4 x 40 x 300,000 = 4.8 x 10^7 more.
    instance = Instance(
        np.zeros(40, int), np.ones(40, int), np.full(40, 300_000), 10**8, hybrid_batching=False
    )
    with pytest.raises(TooLargeError, match=r"7.2e\+07"):
        solve_by_highs(Task(instance, objective=("tel",)), SolveOptions())


@pytest.mark.parametrize("objective", ["max_tpot", "makespan,tel"])
def test_auto_keeps_the_best_schedule_where_no_model_can_be_built(objective: str) -> None:
    # Only CP-SAT has these objectives, and its model is too large.
    with pytest.warns(UserWarning, match=r"cpsat found no schedule|no model was solved"):
        found = solve(Problem(LARGE["seconds"], MODEL, objective), time_limit_s=1)
    assert found.status is Status.FEASIBLE
    assert found.schedule is not None


def test_without_time_for_the_model_the_start_and_the_bound_are_the_answer() -> None:
    """No time at all: what was known before the model was built is the answer."""
    instance = read_instance("tiny")
    with pytest.warns(UserWarning, match="time limit while the model was built"):
        found = solve(instance, method="highs", time_limit_s=0.0)
    assert found.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert found.bound is not None
    assert found.bound <= found.value


# The clock


def test_the_clock_stands_still_while_a_loop_is_compiled() -> None:
    budget, begin, real = Budget(60.0), work_time(), time.perf_counter()
    # A new function, which numba compiles at its first call.
    numba.njit(lambda x: x + len([x]))(1)
    assert work_time() - begin < time.perf_counter() - real
    assert budget.spent_s < time.perf_counter() - real
    assert not work_time.stands


def test_the_clock_goes_on_when_the_last_of_nested_compilations_has_ended() -> None:
    """Stopped twice, it goes on at the second `go`."""
    work_time.stop()
    work_time.stop()
    at = work_time()
    work_time.go()
    time.sleep(0.01)
    assert work_time() == at
    assert work_time.stands
    work_time.go()
    time.sleep(0.01)
    assert at < work_time()


# Ctrl-C

# Presses Ctrl-C at the moment when a module is imported.
PRESSED = """
import signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Press())
from optsched.cli import main
main()
"""


@pytest.mark.parametrize(
    "module",
    [
        "optsched.cli.application",
        "numba",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("typer", "optsched.files.read_write", "optsched.policies")
        ),
    ],
)
def test_ctrl_c_while_the_program_loads_is_one_line(module: str) -> None:
    words = ["simulate", "tiny", "--policy", "fcfs"]
    done = subprocess.run(
        [sys.executable, "-c", PRESSED.format(module=module), *words],
        capture_output=True,
        text=True,
        timeout=COMPILING_S,
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n"), done


# Presses Ctrl-C three times, 20 ms apart, some time after a command has begun its work.
TWICE = """
import os, signal, sys, threading, time
from optsched.cli import main
from optsched.cli import output

def press():
    for _ in range(3):
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

begun = output.stop_at_ctrl_c.__wrapped__
from contextlib import contextmanager

@contextmanager
def pressed():
    with contextmanager(begun)() as stop:
        threading.Timer({after}, press).start()
        yield stop

output.stop_at_ctrl_c = pressed
main()
"""


@pytest.mark.parametrize(
    ("words", "after"),
    [
        ("compare", 0.0),
        # When these are pressed is a matter of the machine's speed.
        pytest.param("solve --method highs", 1.0, marks=pytest.mark.slow),
        pytest.param("compare", 1.0, marks=pytest.mark.slow),
        pytest.param("bound", 0.2, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_three_times_keeps_what_was_found(tmp_path: Path, words: str, after: float) -> None:
    command, *rest = words.split()
    instance = LARGE["seconds"]
    costs = ["--cost-model", MODEL]
    if "highs" in rest:
        instance, costs = spread(40, 40, seconds=False), []
    write_instance(instance, tmp_path / "large.json")
    done = subprocess.run(
        [sys.executable, "-c", TWICE.format(after=after), command, "large.json", *rest, *costs],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=COMPILING_S,
    )
    assert "Traceback" not in done.stderr
    # 4: it came before there was anything, 0: there is an answer.
    assert done.returncode in (0, 4), done
    if done.returncode == 4:
        assert "interrupted" in done.stderr, done
    else:
        assert done.stdout, done


@pytest.mark.parametrize("name", ["trail", "elis"])
def test_predictions_of_every_token_are_refused_where_they_do_not_fit(name: str) -> None:
    with pytest.raises(InputError, match="output_tokens"):
        predict(huge("outputs", "second"), name)
