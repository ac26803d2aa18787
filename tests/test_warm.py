"""`optsched --warmup`: what commands compile is compiled before, and no time limit pays for it."""

import gc
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from command_line import run

import optsched
import optsched.problem.kernel as kernel
from optsched.analysis.warm import compile_later
from optsched.cli import beside
from optsched.judge import replay
from optsched.problem.budget import Clock, work_time
from optsched.problem.kernel import njit

# What must not compile; {0} is an instance and {1} the cost model, if any.
COMMANDS = (
    "compare {0} {1} --policy vllm-v1 --policy sarathi --time-limit 2",
    "bound {0} {1} --time-limit 2",
    "solve {0} {1} --time-limit 2",
    "capacity {0} {1} --slo-ttft 1 --policy fcfs",
)


def test_the_clock_knows_for_how_long_it_stood() -> None:
    clock = Clock()
    assert clock.stood_s == 0
    begin = clock()
    clock.stop()
    while clock.stood_s == 0:
        pass
    assert clock() == begin or clock() - begin < 1  # it stands; what was before counts
    clock.go()
    stood = clock.stood_s
    assert stood > 0
    assert clock.stood_s == stood


def run_in(package: Path, words: str) -> str:
    """Run a command of a copy of the package in a process of its own. Return what it says."""
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "optsched", *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert result.returncode in (0, 4), result.stderr
    return result.stdout + result.stderr


def test_what_compiling_leaves_is_collected_while_the_clock_stands() -> None:
    stood = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] > 0:
            now = work_time()
            time.sleep(0.001)
            stood.append(work_time() == now)

    double = njit(eval("lambda x: x + x"))  # in no file, so that it is never kept
    gc.callbacks.append(note)
    try:
        assert double(21) == 42
    finally:
        gc.callbacks.remove(note)

    assert stood
    assert all(stood)


@pytest.mark.parametrize("shared", [False, True])
def test_a_schedule_of_a_file_needs_no_loop_compiled_anew(tmp_path: Path, shared: bool) -> None:
    instance = optsched.generate("prefix-trees", n=6) if shared else "tiny-seconds"
    problem = optsched.Problem(instance, "llama2-7b-a100-infermax")
    schedule = optsched.run(problem, "fcfs").schedule
    optsched.write_schedule(schedule, tmp_path / "s.json")
    before = len(replay._replay.signatures)
    read = optsched.read_schedule(tmp_path / "s.json", problem.instance)
    assert not read.request.flags.writeable  # while those of a policy's schedule can be written
    ends = [optsched.evaluate(problem, one).finish.tolist() for one in (read, schedule)]
    assert ends[0] == ends[1]
    assert len(replay._replay.signatures) == before


@pytest.mark.parametrize("job", sorted({job for jobs in beside._LATER.values() for job in jobs}))
@pytest.mark.parametrize("objective", ["tel", "slo_attainment"])
def test_what_is_compiled_beside_a_command_is_work_without_an_error(
    job: str, objective: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of short time limits
        compile_later(job, objective)


def test_a_command_has_compiled_beside_it_what_its_options_need() -> None:
    problem = optsched.Problem("tiny-seconds", "llama2-7b-a100-infermax")
    large = optsched.Problem("demo", "llama2-7b-a100-infermax")
    rounds = optsched.Problem("tiny")

    def jobs(command: str, problem: optsched.Problem, **values: object) -> list[str]:
        return beside._jobs(command, {"problem": problem, **values})

    assert jobs("solve", problem, method="auto") == ["labels", "bound", "search"]
    assert jobs("solve", large) == ["bound", "search"]  # too many requests for labels
    assert jobs("solve", problem, method="cpsat") == []
    assert jobs("solve", rounds) == []
    assert jobs("compare", large, bound=False, policies=["vllm-v1"]) == ["vllm-v1"]
    assert jobs("evaluate", problem) == []


def test_the_clock_stands_while_it_tells_and_goes_on_if_that_fails() -> None:
    clock, now = Clock(), [0.0]
    clock.now = lambda: now[0]

    def tell() -> None:
        now[0] += 5
        raise OSError("no process more")

    clock.tell = tell
    with pytest.raises(OSError, match="no process"):
        clock.stop()
    clock.go()  # as numba does then
    assert (clock(), clock.stood_s) == (0.0, 5.0)
    now[0] += 1
    assert clock() == 1.0


def copy(folder: Path) -> Path:
    """Copy the package without its machine code."""
    root = Path(kernel.__file__).parents[2]
    shutil.copytree(root / "optsched", folder / "optsched", ignore=lambda *_: ["__pycache__"])
    for name in ("instances", "models"):
        (folder / name).symlink_to(root / name)
    return folder


@pytest.mark.slow  # compiles everything
def test_after_a_warmup_no_command_compiles(tmp_path: Path) -> None:
    cold = run_in(copy(tmp_path / "cold"), "compare tiny --policy fcfs --no-bound")
    assert "compiling loops took" in cold
    assert "compiling loops took" in run_in(copy(tmp_path / "warm"), "--warmup")
    run("generate", "lognormal", "--set", "n=50", "-o", tmp_path / "many.json")
    run(
        "generate",
        "jaillet-model-2",
        "--set",
        "n=25",
        "--seed",
        "3",
        "-o",
        tmp_path / "rounds.json",
    )

    cost = "--cost-model llama2-7b-a100-infermax-paper"  # not the one of the warmup
    for command in COMMANDS:
        words = command.format(tmp_path / "many.json", cost)
        assert "compiling" not in run_in(tmp_path / "warm", words), command
    for command in COMMANDS[:3]:
        words = command.format(tmp_path / "rounds.json", "")
        assert "compiling" not in run_in(tmp_path / "warm", words), command
    # It proves its optimum at once, with loops of its own.
    exact = run_in(tmp_path / "warm", f"solve tiny-seconds {cost.split()[1]} --time-limit 20")
    assert "compiling" not in exact
    assert "optimal: tel" in exact


@pytest.mark.slow  # compiles for a minute
def test_the_first_answer_of_an_installation_is_proved_and_the_second_compiles_nothing(
    tmp_path: Path,
) -> None:
    package = copy(tmp_path / "cold")
    command = "solve tiny-seconds llama2-7b-a100-infermax --time-limit 20"
    first = run_in(package, command)
    assert "compiling loops took" in first
    assert "optimal: tel" in first
    assert "compiling" not in run_in(package, command)
