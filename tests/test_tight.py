"""What a certificate proves is all that it proves: its check refuses a unit more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import optsched
from optsched import bound
from optsched.bounds.verify import verify
from optsched.cli import app
from optsched.files.read_write import write_json

ROOT = Path(__file__).resolve().parent.parent
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
    """With `tight` each check is asked for a unit more, too; {} has no complaint."""
    entry = ENTRIES[name]
    found = optsched.library.verify([name], tight=True)
    # The last level of a ramp that was stopped may prove more than the value it was stopped at.
    stopped = entry["bound"]["method"].startswith("ramp") and entry["status"] == "open"
    assert found == {} or (stopped and "is proved, too" in found[name])


def test_the_command_names_the_step_that_fails(tmp_path: Path) -> None:
    proof = tmp_path / "proof.json"
    write_json(bound("tiny", method="pairs", time_limit_s=0).certificate, proof)
    value = verify("tiny", proof)
    shown = CliRunner().invoke(app, ["verify", "tiny", str(proof), "--tight"])
    assert shown.exit_code == 0
    words = f"a unit more is refused: certificate: value: found {value + 1}; expected {value}"
    assert words in " ".join(shown.stdout.split())


def test_of_a_folder_every_certificate_is_held_against_a_unit_more(tmp_path: Path) -> None:
    for name, method in (("tiny", "pairs"), ("worst-mc-sf-online", "dual")):
        shutil.copy(ROOT / "instances" / f"{name}.json", tmp_path)
        proof = bound(name, method=method, time_limit_s=1).certificate
        write_json(proof, tmp_path / f"{name}-proof.json")

    shown = CliRunner().invoke(app, ["verify", str(tmp_path), "--tight"])
    assert shown.exit_code == 0
    assert shown.stdout.count("a unit more is refused") == 2  # one per certificate


def test_of_the_library_what_proves_a_unit_more_is_named() -> None:
    shown = CliRunner().invoke(app, ["verify", "library/tiny-n4", "--tight"])
    assert (shown.exit_code, shown.stdout) == (0, "instances: 1, failures: 0\n")
