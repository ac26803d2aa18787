"""What a certificate proves is all that it proves: its check refuses a unit more."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import optsched
from optsched import Problem, bound
from optsched.analysis.library import _pools
from optsched.bounds.verify import refusal, verify
from optsched.cli import app
from optsched.costs.load import load_cost_model
from optsched.files.library import library_folder
from optsched.files.read_write import read_json, write_json
from optsched.problem.errors import ViolationError

ENTRIES = optsched.library.read_library()["instances"]
QUICK = {"tiny-n4", "worst-fcfs", "jaillet-2-n100", "csp-b4-o4-i64", "chat-x0.25"}
"""One of each leaf that is checked within a second."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, entry in ENTRIES.items()
        if entry.get("bound")
    ],
)
def test_every_certificate_of_the_library_refuses_a_unit_more(name: str) -> None:
    entry = ENTRIES[name]
    cost = entry["cost_model"] and load_cost_model(entry["cost_model"])
    problem = Problem(optsched.library.load(name), cost)
    certificate = read_json(library_folder(None) / entry["bound"]["file"])
    # The last level of a ramp that was stopped may prove more than the value it was stopped at.
    stopped = certificate["tree"].get("relaxation") == "ramp" and entry["status"] == "open"
    try:
        words = refusal(_pools(problem, entry) or problem, certificate)
    except ViolationError as error:
        words = error.rule

    assert "certificate: " in words or (stopped and words == "certificate_tight")


def test_the_command_names_the_step_that_fails(tmp_path: Path) -> None:
    proof = tmp_path / "proof.json"
    write_json(bound("tiny", method="pairs", time_limit_s=0).certificate, proof)
    value = verify("tiny", proof)
    shown = CliRunner().invoke(app, ["verify", "tiny", str(proof), "--tight"])
    assert shown.exit_code == 0
    words = f"a unit more is refused: certificate: value: found {value + 1}; expected {value}"
    assert words in " ".join(shown.stdout.split())
