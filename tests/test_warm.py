"""`optsched --warmup`: what commands compile is compiled before, and no time limit pays for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run

import optsched.problem.kernel as kernel
from optsched.problem.budget import Clock

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


def optsched(words: str, package: Path) -> str:
    """Run a command of a copy of the package in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "optsched", *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert result.returncode in (0, 4), result.stderr
    return result.stderr


def copy(folder: Path) -> Path:
    """Copy the package without its machine code."""
    root = Path(kernel.__file__).parents[2]
    shutil.copytree(root / "optsched", folder / "optsched", ignore=lambda *_: ["__pycache__"])
    for name in ("instances", "models"):
        (folder / name).symlink_to(root / name)
    return folder


@pytest.mark.slow  # compiles everything
def test_after_a_warmup_no_command_compiles(tmp_path: Path) -> None:
    cold = optsched("compare tiny --policy fcfs --no-bound", copy(tmp_path / "cold"))
    assert "compiling loops took" in cold
    assert "compiling loops took" in optsched("--warmup", copy(tmp_path / "warm"))
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
        assert "compiling" not in optsched(words, tmp_path / "warm"), command
    for command in COMMANDS[:3]:
        words = command.format(tmp_path / "rounds.json", "")
        assert "compiling" not in optsched(words, tmp_path / "warm"), command
