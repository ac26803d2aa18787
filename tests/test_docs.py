"""Documentation runs: code, commands and what they print, and the site as a whole."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import optsched
from optsched.cli import app
from optsched.policies import policies

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
STATUS = re.compile(r"#\s*exit (\d+)\s*$")


class Block(NamedTuple):
    language: str
    title: str | None
    text: str


class Command(NamedTuple):
    words: list[str]
    status: int
    printed: list[str]


def blocks(page: Path) -> Iterator[Block]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        title = TITLE.search(match[2])
        yield Block(match[1], title[1] if title else None, match[3])


def commands(block: str) -> Iterator[Command]:
    """Yield each command, the status it ends with (``# exit 3``) and the lines shown under it."""
    for part in re.split(r"^(?=\$ )", block.replace("\\\n", " "), flags=re.MULTILINE):
        line, _, rest = part.partition("\n")
        if line.startswith("$ optsched"):
            status = STATUS.search(line)
            words = shlex.split(line[2:], comments=True)[1:]
            printed = [text for text in rest.splitlines() if text.strip(" .")]
            yield Command(words, int(status[1]) if status else 0, printed)


def as_pattern(line: str) -> str:
    """Return a shown line as a pattern: any run of blanks, ``...`` for anything."""
    words = (r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
    return r"\s*" + r".*".join(words) + r"\s*"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(True for _ in blocks(page))], ids=name
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("instances", "models"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # another test's library may have set it
    scope: dict[str, object] = {"__name__": "docs"}
    for language, title, text in blocks(page):
        if title is not None:
            (tmp_path / title).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, f"{page.name}: python block", "exec"), scope)
        elif language == "console":
            for words, status, printed in commands(text):
                result = CliRunner().invoke(app, words)
                assert result.exit_code == status, (words, result.stdout, result.stderr)
                lines = result.output.splitlines()
                for line in printed:
                    assert any(re.fullmatch(as_pattern(line), real) for real in lines), (
                        f"{name(page)} shows {line!r}; {words} printed\n{result.output}"
                    )


def test_the_readme_has_blocks_of_both_kinds() -> None:
    kinds = [block.language for block in blocks(PAGES[0])]
    assert "python" in kinds
    assert any(b.language == "console" and any(commands(b.text)) for b in blocks(PAGES[0]))


def test_shown_output_is_compared_word_by_word() -> None:
    (command,) = commands("$ optsched solve tiny  # exit 3\nTEL    33  rounds\n...\n$ ls\nno\n")
    assert command == (["solve", "tiny"], 3, ["TEL    33  rounds"])
    assert re.fullmatch(as_pattern("TEL 33 ..."), "  TEL          33  rounds")
    assert not re.fullmatch(as_pattern("TEL 33 ..."), "TEL  34  rounds")


def test_every_command_stands_beside_its_python_call() -> None:
    page = (ROOT / "docs" / "api" / "side-by-side.md").read_text(encoding="utf-8")
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for command in group.commands:
        words = f"`{command}`", f"`optsched {command}", f"$ optsched {command} "
        assert any(word in page for word in words), command


def test_every_policy_has_a_page() -> None:
    front = re.compile(r"\A---\npolicies: \[(.*?)\]\n---\n")
    pages = sorted((ROOT / "docs" / "policies").glob("*.md"))
    found = [front.match(page.read_text(encoding="utf-8")) for page in pages]
    shown = [word.strip() for match in found if match for word in match[1].split(",")]
    assert sorted(shown) == sorted(policies())


LABORATORY = [page for page in PAGES if page.parent.name == "lab" and page.stem != "index"]


@pytest.mark.parametrize("page", LABORATORY, ids=name)
def test_a_laboratory_page_opens_with_its_result_in_three_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    opening = re.match(r'# [^\n]+\n\n!!! abstract "Result"\n\n((?:    [^\n]+\n)+)\n', text)
    assert opening, f"{name(page)}: no result under the title"
    sentences = re.findall(r"(?<! al)[.?!](?=\s|$)", opening[1])
    assert len(sentences) == 3, f"{name(page)}: {len(sentences)} sentences; expected 3"


def test_the_laboratory_lists_its_pages() -> None:
    index = (ROOT / "docs" / "lab" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert listed == {page.name for page in LABORATORY}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_papers_go_by_authors_and_year(page: Path) -> None:
    """No paper is called by a number, as in "paper 002" or "(003, section 3.2)"."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert not re.findall(r"[Pp]aper 00\d|(?<![\d.,])\b00[0-4]\b(?![,.]?\d)", text)


def test_pages_that_code_and_texts_name_exist() -> None:
    folders = ("optsched", "benchmarks", "tests", "notebooks", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    for path in [*found, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "mkdocs.yml"]:
        if path.suffix in {".py", ".md", ".yml"}:
            for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")):
                assert (ROOT / page).is_file(), f"{name(path)} names {page}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_the_site_builds_without_warnings_and_fetches_nothing(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
        r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|icon))[^>]*\bhref=[\"']?(?:https?:)?//",
        re.IGNORECASE,
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not fetched.search(text), page.name


def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = "".join(p.read_text(encoding="utf-8") for p in (site / "api").glob("*.html"))
    for public in set(optsched.__all__) - {"__version__"}:
        found = getattr(optsched, public)
        name = getattr(found, "__qualname__", "")
        anchor = f"{found.__module__}.{name}" if name else found.__name__
        assert f'id="{anchor}"' in reference, anchor


def test_formulas_are_markup_and_not_source(site: Path) -> None:
    text = (site / "formulations.html").read_text(encoding="utf-8")
    assert text.count("<math ") > 100
    assert "\\(" not in text
    assert "arithmatex" not in text
    for formula in re.findall(r"<math .*?</math>", text, re.DOTALL):
        assert "\\" not in formula  # a command that the converter does not know
