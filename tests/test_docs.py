"""Documentation runs: code, commands and what they print, and the site as a whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import FENCE, ROOT, TITLE, as_pattern, blocks, commands, missing_line, name
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import optsched
from optsched.cli import app
from optsched.files.library import read_library
from optsched.files.schemas import HOME, MODELS
from optsched.policies import list_policies
from optsched.problem.metrics import TABLE
from optsched.workloads.traces import trace_formats

SIDE = ROOT / "tests" / "side_by_side.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), SIDE]
DEVELOP = ROOT / "docs" / "develop"
"""Guides that change the package; tests/test_guides.py runs them in a copy of it."""


def pages_with_blocks() -> list[Any]:
    """Return the README, and the other pages that run, as parts of the product as a whole."""
    pages = (page for page in PAGES if page.parent != DEVELOP and any(blocks(page)))
    whole = pytest.mark.whole
    return [pytest.param(p, marks=() if p == PAGES[0] else whole, id=name(p)) for p in pages]


@pytest.mark.parametrize("page", pages_with_blocks())
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
            for (program, *words), status, printed in commands(text):
                if program != "optsched":
                    continue
                result = CliRunner().invoke(app, words)
                assert result.exit_code == status, (words, result.stdout, result.stderr)
                line = missing_line(printed, result.output)
                assert line is None, f"{name(page)} shows {line!r}; found\n{result.output}"


def test_the_readme_has_blocks_of_both_kinds() -> None:
    kinds = [block.language for block in blocks(PAGES[0])]
    assert "python" in kinds
    assert any(b.language == "console" and any(commands(b.text)) for b in blocks(PAGES[0]))


def test_shown_output_is_compared_word_by_word() -> None:
    # Each is the words of a command, its exit status (after `# exit`), and the lines it shows but
    # `...`.
    one, two = commands("$ optsched solve tiny  # exit 3\nTEL    33  rounds\n...\n$ ls\nno\n")
    assert one == (["optsched", "solve", "tiny"], 3, ["TEL    33  rounds"])
    assert two == (["ls"], 0, ["no"])
    assert re.fullmatch(as_pattern("TEL 33 ..."), "  TEL          33  rounds")
    assert not re.fullmatch(as_pattern("TEL 33 ..."), "TEL  34  rounds")


def test_every_command_stands_beside_its_python_call() -> None:
    page = SIDE.read_text(encoding="utf-8")
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    shown = [name for name, one in group.commands.items() if not one.hidden]
    shown += [f"gpu {name}" for name in group.commands["gpu"].commands]
    for command in shown:
        words = f"`{command}`", f"`optsched {command}", f"$ optsched {command} "
        assert any(word in page for word in words), command


def test_every_policy_has_a_page() -> None:
    front = re.compile(r"\A---\npolicies: \[(.*?)\]\n---\n")
    pages = sorted((ROOT / "docs" / "policies").glob("*.md"))
    found = [front.match(page.read_text(encoding="utf-8")) for page in pages]
    shown = [word.strip() for match in found if match for word in match[1].split(",")]
    assert sorted(shown) == sorted(list_policies())


LAB_SHELF = [page for page in PAGES if "lab" in page.relative_to(ROOT).parts]
LABORATORY = [page for page in LAB_SHELF if page.stem != "index"]
# A page of the laboratory begins with its title, its question and its result.
OPENING = re.compile(
    r'# [^\n]+\n\n\*([^\n]+\?)\*\n\n!!! abstract "Result"\n\n((?:    [^\n]+\n)+)\n'
)
# A row of the index of the laboratory: the question, an answer, and the page.
LISTED = r"^\| ([^|]+\?) \| [^|]+ \| \[[^]]+\]\(([\w-]+\.md)\)"


@pytest.mark.parametrize("page", LABORATORY, ids=name)
def test_a_laboratory_page_opens_with_a_question_and_three_sentences_of_result(page: Path) -> None:
    opening = OPENING.match(page.read_text(encoding="utf-8"))
    assert opening, f"{name(page)}: no question and result under the title"
    sentences = re.findall(r"(?<! al)[.?!](?=\s|$)", opening[2])
    assert len(sentences) == 3, f"{name(page)}: {len(sentences)} sentences; expected 3"


@pytest.mark.parametrize("page", LABORATORY, ids=name)
def test_a_laboratory_page_is_short(page: Path) -> None:
    words = re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8"))
    limit = 1250 if page.stem in ("trail-lemma-1", "papers") else 950  # a proof, seven papers
    assert len(words) <= limit, f"{name(page)}: {len(words)} words; the rest belongs into a commit"


def test_the_laboratory_lists_its_pages_by_their_questions() -> None:
    index = (ROOT / "docs" / "lab" / "index.md").read_text(encoding="utf-8")
    listed = {page: question for question, page in re.findall(LISTED, index, re.MULTILINE)}
    questions = {p.name: OPENING.match(p.read_text(encoding="utf-8")) for p in LABORATORY}
    assert listed == {page: found and found[1] for page, found in questions.items()}


@pytest.mark.parametrize("page", [*PAGES[:2], *LAB_SHELF], ids=name)
def test_links_between_files_lead_somewhere_on_github_too(page: Path) -> None:
    """The site's build checks links between its pages, but not those of and to other files."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


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
            text = path.read_text(encoding="utf-8")
            # Guides may name the pages that they themselves create.
            written = TITLE.findall(text) if path.parent == DEVELOP else []
            for page in {*re.findall(r"\bdocs/[\w/-]+\.md\b", text)} - {*written}:
                assert (ROOT / page).is_file(), f"{name(path)} names {page}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built once for all tests of this file."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"OPTSCHED_RUN_NOTEBOOKS": "false"}  # pytest runs them (nbmake)
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
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
    assert len(pages) > 20  # all pages were built, and not an index alone
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


def test_tables_are_made_with_the_site(site: Path) -> None:
    pages = (site / f"{name}.html" for name in ("traces", "library", "files"))
    traces, library, files = (page.read_text("utf-8") for page in pages)
    assert [name for name in trace_formats() if f'<h3 id="{name}">' not in traces] == []
    assert [name for name in TABLE if f"<td><code>{name}</code></td>" not in files] == []
    names = read_library()["instances"]
    assert [name for name in names if f"<td><code>{name}</code></td>" not in library] == []


def test_schemas_lie_where_they_say(site: Path) -> None:
    for file in (site / "schemas").iterdir():
        made = json.loads(file.read_text(encoding="utf-8"))
        assert made["$id"] == f"{HOME}/schemas/{file.name}"
    assert {file.name for file in (site / "schemas").iterdir()} == {f"{m}-1.json" for m in MODELS}


def test_formulas_are_markup_and_not_source(site: Path) -> None:
    text = (site / "formulations.html").read_text(encoding="utf-8")
    assert text.count("<math ") > 100  # the page has formulas by the hundred
    assert "\\(" not in text
    assert "arithmatex" not in text
    for formula in re.findall(r"<math .*?</math>", text, re.DOTALL):
        assert "\\" not in formula  # a command that the converter does not know


def test_notebooks_are_pages_and_links_to_them_lead_there(site: Path) -> None:
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert "This build has not run the notebook." in page
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert not [page for page, text in texts.items() if re.search(r'href="[^"]*\.ipynb"', text)]
    assert 'href="../notebooks/gap.html"' in texts[site / "howto" / "gap.html"]


def test_the_search_works_in_pages_from_the_file_system(site: Path, browser: Any) -> None:
    from selenium.webdriver.support.expected_conditions import element_to_be_clickable
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "notebooks" / "gap.html").as_uri())
    wait = WebDriverWait(browser, 60)
    box = wait.until(element_to_be_clickable(("css selector", ".md-search__input")))
    box.click()
    box.send_keys("certificate")
    links = "a.md-search-result__link[href*='howto/certificate.html']"
    found = wait.until(lambda b: b.find_elements("css selector", links))
    found[0].click()
    wait.until(lambda b: "howto/certificate.html" in b.current_url)
    assert browser.current_url.startswith(site.as_uri())
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_page_on_certificates_checks_one_in_the_browser(site: Path, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "howto" / "certificate.html").as_uri())
    files = [ROOT / "instances" / "library" / at for at in ("", "certificates")]
    names = "\n".join(str(folder / "worst-fcfs.json.gz") for folder in files)
    browser.find_element("css selector", "#check input").send_keys(names)
    said = browser.find_element("css selector", "#check output")
    WebDriverWait(browser, 60).until(lambda b: said.text.startswith("accepted"))
    assert said.text == "accepted: the optimum is 69 rounds (tel)"
