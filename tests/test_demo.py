"""The demo: the shipped instance, and four commands that leave a page and a picture."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_line import run

import optsched

ROOT = Path(__file__).resolve().parents[1]


def test_the_instance_is_what_the_documented_command_generates(tmp_path: Path) -> None:
    lines = (ROOT / "docs" / "howto" / "demo.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = [line for line in lines.splitlines() if line.startswith("$ optsched generate")]
    words = shlex.split(command)[2:-1]
    run(*words, tmp_path / "again.json")
    shipped = optsched.read_instance("demo")
    assert optsched.read_instance(tmp_path / "again.json").sha256 == shipped.sha256
    assert shipped.n == 300  # as the page's command says


@pytest.mark.whole
def test_the_demo_has_no_row_without_a_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four commands, four policies with both ratios, a page with a picture, and a next command
    that runs."""
    monkeypatch.chdir(tmp_path)
    text = run("demo", "-o", "page.html")
    assert text.count("$ optsched ") == 4
    assert "attains it up to rate scale" in text
    assert "impossible for any schedule from rate scale" in text
    found = json.loads(Path("page-files/comparison.json").read_text())
    names = [row["policy"] for row in found["policies"]]
    assert names == ["vllm-v1", "sarathi", "least-work", "spf"]
    for row in found["policies"]:
        assert 1 <= row["ratio_to_best_known"] < row["ratio_to_bound"]
    assert Path("page.html").stat().st_size > 100_000  # a page with its pictures
    assert Path("page.png").read_bytes()[:4] == b"\x89PNG"
    (following,) = [line for line in text.splitlines() if line.startswith("  optsched ")]
    words = shlex.split(following)
    assert "how far: the twin has" in run(*words[1:])  # the next command, as it stands


def test_the_demo_checks_its_outputs_before_the_work(tmp_path: Path) -> None:
    assert "expected a name ending in .html" in run("demo", "-o", tmp_path / "a.txt", status=2)
    assert "error: " in run("demo", "-o", tmp_path / "none" / "a.html", status=2)
