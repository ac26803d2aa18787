"""`optsched warmup`: what commands compile is compiled before, and time limits never pay for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run

from optsched.problem.budget import Clock

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


def optsched(words: str, cache: Path) -> str:
    """Run a command in a process of its own with its own folder of machine code."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "optsched", *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert result.returncode in (0, 4), result.stderr
    return result.stderr


@pytest.mark.slow  # compiles everything
def test_after_a_warmup_no_command_compiles(tmp_path: Path) -> None:
    cold = optsched("compare tiny --policy fcfs --no-bound", tmp_path / "cold")
    assert "compiling loops took" in cold
    assert "compiling loops took" in optsched("warmup", tmp_path / "warm")
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
