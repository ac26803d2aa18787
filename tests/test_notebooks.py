"""Notebooks are pairs that say the same; pytest executes the .ipynb files themselves (nbmake)."""

from __future__ import annotations

from pathlib import Path

import pytest

import optsched

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ("first_hour", "gap", "eviction", "unknown_lengths", "price_of_memory")


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
