"""Blocks of the documentation's pages: files to write, Python to run, commands to call."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(`{3,})(\w+)([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
STATUS = re.compile(r"#\s*exit (\d+)\s*$")


class Block(NamedTuple):
    """Code between fences; ``title`` names the file that it is written to."""

    language: str
    title: str | None
    text: str


class Command(NamedTuple):
    """Words after ``$``, the status that they end with, and the lines shown under them."""

    words: list[str]
    status: int
    printed: list[str]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        title = TITLE.search(match[3])
        yield Block(match[2], title[1] if title else None, match[4])


def commands(block: str) -> Iterator[Command]:
    """Yield every command, also those that nobody runs; ``# exit 3`` says how one ends."""
    for part in re.split(r"^(?=\$ )", block.replace("\\\n", " "), flags=re.MULTILINE):
        line, _, rest = part.partition("\n")
        if line.startswith("$ "):
            status = STATUS.search(line)
            words = shlex.split(line[2:], comments=True)
            printed = [text for text in rest.splitlines() if text.strip(" .")]
            yield Command(words, int(status[1]) if status else 0, printed)


def as_pattern(line: str) -> str:
    """Return a shown line as a pattern: any run of blanks, ``...`` for anything."""
    words = (r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
    return r"\s*" + r".*".join(words) + r"\s*"


def missing_line(printed: list[str], output: str) -> str | None:
    """Return the first shown line that an output does not have, or None."""
    lines = output.splitlines()
    for line in printed:
        if not any(re.fullmatch(as_pattern(line), real) for real in lines):
            return line
    return None
