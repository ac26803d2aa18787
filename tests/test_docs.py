"""Documentation runs: Python blocks are executed, ``$ optsched`` lines of console blocks too."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optsched.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATUS = re.compile(r"#\s*exit (\d+)\s*$")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        yield match.group(1), match.group(2)


def commands(block: str) -> Iterator[tuple[list[str], int]]:
    """Yield the words and the expected status (``# exit 3`` at the end) of each command."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ optsched"):
            status = STATUS.search(line)
            words = shlex.split(line[2:], comments=True)[1:]
            yield words, int(status.group(1)) if status else 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("instances", "models"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "docs"}
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, f"{page.name}: python block", "exec"), scope)
        elif language == "console":
            for words, status in commands(text):
                result = CliRunner().invoke(app, words)
                assert result.exit_code == status, (words, result.stdout, result.stderr)


def test_the_readme_has_blocks_of_both_kinds() -> None:
    kinds = [kind for kind, _ in blocks(PAGES[0])]
    assert "python" in kinds
    assert sum(1 for kind, text in blocks(PAGES[0]) if kind == "console" for _ in commands(text))
