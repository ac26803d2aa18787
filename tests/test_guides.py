"""The guides of docs/develop are followed word by word, in one copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks, commands, missing_line, name

GUIDES = sorted((ROOT / "docs" / "develop").glob("add-*.md"))
COPIED = ("optsched", "tests", "benchmarks", "docs", "models", "instances", "mkdocs.yml",
          "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")  # fmt: skip
RUN = {"optsched": ["-m", "optsched"], "python": [], "ruff": ["-m", "ruff"]}
"""Commands that are run, and how; the others are for people."""
STYLE = ("ruff check", "ruff format --check",
         "python -m pytest -q -n 0 tests/test_docstrings.py tests/test_certified.py")  # fmt: skip
"""What `make test` asks of code, docstrings and certificates, and the guides' tests do not."""


def copy_of_the_checkout(folder: Path) -> None:
    left = shutil.ignore_patterns("__pycache__", "*.png")
    for part in COPIED:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=left)
        else:
            shutil.copy(ROOT / part, folder / part)


def changed(text: str, change: str) -> str:
    """Return a text with a change in the form of ``diff``, whose context says where it belongs.

    ``@@`` stands between one place and the next.

    Raises
    ------
    ValueError
        What the change takes away or keeps does not stand there, or stands there twice.
    """
    lines = text.splitlines()
    for place in re.split(r"^@@.*\n", change, flags=re.MULTILINE):
        marked = [(line[:1] or " ", line[1:]) for line in place.splitlines()]
        before = [line for mark, line in marked if mark in " -"]
        after = [line for mark, line in marked if mark in " +"]
        size = len(before)
        found = [k for k in range(len(lines)) if lines[k : k + size] == before]
        if len(found) != 1:
            raise ValueError("\n".join([f"found {len(found)} times; expected once:", *before]))
        lines[found[0] : found[0] + size] = after
    return "\n".join(lines) + "\n"


def write(block: Block, folder: Path) -> None:
    """Do what a titled block says: change a file that is there, or write a new one."""
    assert block.title is not None
    file = folder / block.title
    if block.language == "diff":
        file.write_text(changed(file.read_text(encoding="utf-8"), block.text), encoding="utf-8")
    else:
        assert not file.exists(), f"{block.title} is there already"
        file.write_text(block.text, encoding="utf-8")


@pytest.mark.whole
def test_all_guides_can_be_followed_one_after_another(tmp_path: Path) -> None:
    copy_of_the_checkout(tmp_path)
    # Compiling takes longer than the guides' few requests: loops run interpreted.
    settings = {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1", "COLUMNS": "200"}
    environment = os.environ | settings

    def run(program: str, words: list[str], status: int) -> str:
        result = subprocess.run(
            [sys.executable, *RUN[program], *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        output = result.stdout + result.stderr
        assert result.returncode == status, f"{program} {words} printed\n{output}"
        return output

    def follow(page: Path) -> set[str]:
        """Do what a guide says, and return the commands that were run."""
        ran = set()
        for block in blocks(page):
            if block.title is not None:
                write(block, tmp_path)
                continue
            for (program, *words), status, printed in commands(block.text):
                if program not in RUN:
                    continue
                output = run(program, words, status)
                line = missing_line(printed, output)
                assert line is None, f"{name(page)} shows {line!r}; {words} printed\n{output}"
                ran.add(" ".join([program, *words[:2]]))
        return ran

    for page in GUIDES:
        assert "python -m pytest" in follow(page), f"{name(page)} runs no test"
    for command in STYLE:
        program, *words = command.split()
        run(program, words, 0)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_lists_the_files_that_it_touches(page: Path) -> None:
    section = page.read_text(encoding="utf-8").partition("\n## Files\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \| (new|changed)\b", section, re.MULTILINE)
    touched = [
        (block.title, "changed" if block.language == "diff" else "new")
        for block in blocks(page)
        if block.title is not None
    ]
    assert sorted(listed) == sorted(set(touched))
    assert all((ROOT / file).exists() == (kind == "changed") for file, kind in listed)


def test_a_change_needs_one_place_that_it_fits() -> None:
    assert changed("a\nb\nc\n", " b\n+new\n-c\n") == "a\nb\nnew\n"
    assert changed("a\nb\nc\n", "-a\n@@\n c\n+d\n") == "b\nc\nd\n"
    for text in ("a\n", "b\nb\n"):
        with pytest.raises(ValueError, match="expected once"):
            changed(text, " b\n+new\n")


def test_there_are_six_guides() -> None:
    assert [page.stem.removeprefix("add-") for page in GUIDES] == [
        "bound", "cost-term", "method", "objective", "policy", "trace-format",
    ]  # fmt: skip
