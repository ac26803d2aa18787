"""Notebooks are pairs that say the same; pytest executes the .ipynb files themselves (nbmake)."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import optsched

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = (
    "first_hour", "gap", "eviction", "unknown_lengths", "price_of_memory", "load", "how_many_gpus",
    "my_vllm", "evolve", "agent_server",
)  # fmt: skip
"""The stops of the tour, in order."""


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_a_notebook_are_equal_and_without_outputs(name: str) -> None:
    jupytext = pytest.importorskip("jupytext")
    script, notebook = (jupytext.read(FOLDER / f"{name}.{end}") for end in ("py", "ipynb"))
    for cell in notebook.cells:
        assert not cell.get("outputs"), "`make notebooks` strips outputs"
        assert cell.get("execution_count") is None
    said = [[(cell.cell_type, cell.source) for cell in form.cells] for form in (script, notebook)]
    assert said[0] == said[1], f"{name}: `make notebooks` writes the .ipynb from the .py"


def test_the_folder_holds_these_pairs_and_nothing_else() -> None:
    found = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")}
    assert found == {f"{name}{end}" for name in NAMES for end in (".py", ".ipynb")}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_imports_only_what_is_public(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("from optsched"):
            assert "._" not in line
            assert not any(
                word.strip().startswith("_") for word in line.split("import")[1].split(",")
            )
    assert optsched.__name__ in text


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_with_a_question_and_says_where_on_the_tour_it_stands(name: str) -> None:
    cells = (FOLDER / f"{name}.py").read_text(encoding="utf-8").split("# %%")
    first = re.sub(r"\s+", " ", cells[1].replace("\n#", "\n"))
    place = NAMES.index(name)
    assert re.search(r"\*\*[^*]+\?\*\*", first)
    assert f"*Stop {place + 1} of {len(NAMES)} on the [tour]" in first
    beside = set(NAMES[max(0, place - 1) : place] + NAMES[place + 1 : place + 2])
    assert set(re.findall(r"\]\((\w+)\.ipynb\)", first)) == beside
    assert all(f"]({after}.ipynb)" in cells[-1] for after in NAMES[place + 1 : place + 2])


# --- Pages of the site (docs/site/notebooks.py) ---------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the part of the site that makes pages, with a cache of its own."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location(
        "site_notebooks", FOLDER.parent / "docs" / "site" / "notebooks.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    return module


def written(path: Path, *sources: str) -> Path:
    """Write a notebook whose cells have these sources."""
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_a_page_has_the_texts_the_code_and_what_it_shows(pages: ModuleType) -> None:
    import nbformat.v4 as v4

    picture = base64.b64encode(b"PNG").decode()
    outputs = [
        v4.new_output("stream", text="one\n"),
        v4.new_output("stream", text="two\n"),
        v4.new_output("display_data", {"image/png": picture, "text/plain": "<Figure>"}),
        v4.new_output("display_data", {"text/markdown": "| a |", "text/plain": "<Markdown>"}),
        v4.new_output(
            "display_data",
            {"text/html": "<div>\n<style>p {}</style>\n\n<table border=1>\n</table></div>"},
        ),
    ]
    text = v4.new_markdown_cell("# Title\n\nSee [that](gap.ipynb), [this](../docs/lab/exact.md).")
    notebook = v4.new_notebook(cells=[text, v4.new_code_cell("1 < 2", outputs=outputs)])
    page, pictures = pages.as_page(notebook, "some")
    assert "See [that](gap.md), [this](../lab/exact.md)." in page
    assert "```python\n1 < 2\n```" in page
    assert "``` { .text .output }\none\ntwo\n```" in page  # streams in one block
    assert "[![Title](some-1.png)" in page
    assert pictures == {"some-1.png": b"PNG"}
    assert '<div class="output"><div><table></table></div></div>' in page  # one line, no style
    assert "\n\n| a |\n\n" in page
    assert not re.search("Figure|<Markdown", page)


@pytest.mark.whole
def test_a_notebook_runs_once_and_without_the_readers_data(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cell writes an x each time that it runs; a second look takes what is kept."""
    monkeypatch.setenv("OPTSCHED_DATA", str(tmp_path))
    counted = "with open('runs', 'a') as file: file.write('x')"
    asked = "import os; print(os.environ.get('OPTSCHED_DATA'))"
    path = written(tmp_path / "some.ipynb", counted, asked)
    for _ in range(2):
        assert pages.executed(path).cells[1].outputs[0].text == "None\n"
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.whole
def test_a_notebook_that_fails_ends_the_build_with_its_name(
    pages: ModuleType, tmp_path: Path
) -> None:
    from mkdocs.exceptions import PluginError

    path = written(tmp_path / "some.ipynb", "assert 1 > 2")
    with pytest.raises(PluginError, match=r"some\.ipynb.*(?s:.*)assert 1 > 2"):
        pages.executed(path)
