"""Another package adds a policy, a bound, a trace format and a command by entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from instances import MODEL

POLICIES = '''
"""A policy of another package."""
from optsched import Rules
from optsched.policies import policy

@policy("their-fcfs", "in order of arrival, two at a time")
def their_fcfs(*, max_running: int = 2) -> Rules:
    return Rules(max_running=max_running)
'''
BOUNDS = '''
"""A bound of another package: one round a request, which is never too much."""
from optsched.bounds.base import IN_ROUNDS, Bound, Proof

THEIRS = Bound("their-bound", "a round for each request", "round", ("tel",),
               lambda task, budget: Proof(task.instance.n), IN_ROUNDS)
'''
TRACES = '''
"""A trace format of another package: arrival in ms, prompt, output."""
from optsched.workloads.traces.base import Block, trace_format
from optsched.workloads.traces.delimited import read_delimited

@trace_format("their-log", "a log of theirs")
def read(source):
    names = {"arrival": ("ms",), "prompt_tokens": ("p",), "output_tokens": ("o",)}
    for rows in read_delimited(source, names):
        yield Block(line=rows.line, prompt_tokens=rows.whole_numbers("prompt_tokens"),
                    output_tokens=rows.whole_numbers("output_tokens"),
                    time_ns=rows.nanoseconds("arrival", "ms"))
'''
COMMANDS = '''
"""A command of another package."""
from optsched.files.read_write import read_instance

def count(instance_file: str, times: int = 1) -> None:
    """Count the requests of an instance.

    Parameters:
      times N: Count each so often.
    """
    print("requests:", times * read_instance(instance_file).n)

def speechless(instance_file):
    pass
'''
ENTRIES = """
[optsched.policies]
theirs = their_package.policies
[optsched.bounds]
theirs = their_package.bounds
[optsched.traces]
theirs = their_package.traces
[optsched.commands]
count = their_package.commands:count
"""
# Of policies: no such module, a function for a module, and a name that is ours. Of commands: no
# such function, one whose parameter has neither type nor words, and a name that is ours.
BROKEN = """
[optsched.policies]
gone = their_package.gone
odd = their_package.commands:count
twice = their_package.twice
[optsched.commands]
lost = their_package.commands:lost
speechless = their_package.commands:speechless
solve = their_package.commands:count
"""
TWICE = """
from optsched.policies import policy

@policy("mc-sf", "another of that name")
def other() -> None: ...
"""


def install(folder: Path, name: str, entries: str) -> None:
    """Write what an installed package leaves beside its code."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with a package that is installed there, with all of the texts above."""
    package = tmp_path / "their_package"
    package.mkdir()
    texts = {"__init__": "", "policies": POLICIES, "bounds": BOUNDS, "traces": TRACES}
    for name, text in {**texts, "commands": COMMANDS, "twice": TWICE}.items():
        (package / f"{name}.py").write_text(text)

    install(tmp_path, "their-package", ENTRIES)
    return tmp_path


# Runs each command line that it reads, and prints its status, output and errors.
IN_A_ROW = """
import contextlib, io, json, sys
from optsched.cli import main

for words in json.load(sys.stdin):
    sys.argv = ["optsched", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(json.dumps((status, out.getvalue(), err.getvalue())))
"""


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str


def optsched(place: Path, *lines: tuple[str, ...]) -> list[Ended]:
    """Run command lines one after the other, in a new process that finds the packages there."""
    paths = os.pathsep.join([str(place), *filter(None, sys.path)])
    told = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_ROW], cwd=place, env=told, input=json.dumps(lines),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Ended(*json.loads(row)) for row in done.stdout.splitlines()]


def test_what_another_package_has_stands_beside_ours(place: Path) -> None:
    (place / "log.csv").write_text("ms,p,o\n0,3,4\n1000,5,2\n")
    # What a plug-in is for comes before any list, so that nothing else has loaded it.
    # `tiny` has six requests.
    said = {
        ("bound", "tiny", "--method", "their-bound"): "6 rounds (their-bound)",
        ("simulate", "tiny", "--policy", "their-fcfs:max_running=1"): "TEL ",
        ("import", "their-log", "log.csv", "-o", "i.json"): "2 requests",
        ("simulate", "i.json", MODEL, "--policy", "their-fcfs"): "makespan",
        ("count", "tiny", "--times", "2"): "requests: 12\n",
        ("list", "policies", "their-fcfs"): "two at a time",
        ("list", "bounds", "their-bound"): "a round for each request",
        ("--help",): "  count       Count the requests of an instance.\n",
        ("count", "--help"): "Count each so often.",
    }
    for (words, text), done in zip(said.items(), optsched(place, *said), strict=True):
        assert done.status == 0, (words, done.err)
        assert text in done.out, (words, done.out)
        assert "entry point" not in done.err

    assert json.loads((place / "i.json").read_text())["requests"]["output_tokens"] == [4, 2]


def test_a_broken_plug_in_is_a_line_that_names_it_and_nothing_else_fails(place: Path) -> None:
    install(place, "broken-package", BROKEN)
    done, shown, solve, speechless = optsched(
        place,
        ("simulate", "tiny", "--policy", "their-fcfs"),
        ("--help",),
        ("solve", "--help"),
        ("speechless",),
    )
    # Its policies: the command runs with what is whole, and each of three broken ones is a line.
    assert done.status == 0, done.err
    told = [line for line in done.err.splitlines() if "entry point" in line]
    of = "of the package broken-package is left out: "
    for line, name, why in zip(
        told,
        ("gone", "odd", "twice"),
        ("No module named", "expected a module", "policy 'mc-sf': found two of that name"),
        strict=True,
    ):
        assert line.startswith(f"warning: optsched.policies: the entry point {name!r} {of}")
        assert why in line

    # Its commands: the one that loads is shown, and the others are named.
    assert shown.status == 0
    assert "  count " in shown.out
    assert "optsched.commands: the entry point 'lost' of the package broken" in shown.err
    assert "optsched.commands: 'speechless' is left out" in shown.err
    # What optsched itself calls by a name stays that.
    assert "Find an optimal schedule" in solve.out
    assert speechless.status == 2


def test_no_plug_in_is_loaded_where_none_is_asked_for(place: Path) -> None:
    (place / "their_package" / "commands.py").write_text("raise SystemExit('loaded')\n")
    (done,) = optsched(place, ("list", "metrics"))
    assert (done.status, done.err) == (0, "")
