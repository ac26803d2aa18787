"""Time limits do not count what is imported once: of a clock of modules, few are left to load."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Solve or bound `tiny` in a process of its own, on a clock of loaded modules.
SCRIPT = """
import sys
import optsched
from optsched.problem.budget import work_time

# A clock that goes on by one whenever a module of another package is loaded.
work_time.now = lambda: float(sum(not name.startswith("optsched") for name in list(sys.modules)))
problem = optsched.Problem(optsched.read_instance("tiny"))
print(optsched.{call}.status)
"""


@pytest.mark.parametrize(
    "call", ["solve(problem, method='highs', time_limit_s=20)", "solve(problem, time_limit_s=20)"]
)
def test_what_is_imported_takes_no_time_of_a_limit(call: str) -> None:
    words = [sys.executable, "-c", SCRIPT.format(call=call)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "optimal\n"
