"""The package as a whole: what may import what, what loads when, and what the wheel holds."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import optsched

ROOT = Path(optsched.__file__).resolve().parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("least_squares", "markup"),
    ("hardware",),
    ("columns",),
    ("forecast",),
    ("instance", "version"),
    ("cost", "schedule"),
    ("schemas",),
    ("files",),
    ("measured", "specs"),
    ("io", "generate", "traces", "data", "profiles"),
    ("roofline",),
    ("fit",),
    ("replay", "spans", "predict", "theory", "validity", "queueing"),
    ("evaluate", "engines"),
    ("policies",),
    ("simulate", "timeline"),
    ("load",),
    ("policies.readable",),
    ("bounds", "solvers"),
    ("formulations.base",),
    ("search",),
    ("formulations",),
    ("solve", "bound"),
    ("compare",),
    ("ratio",),
    ("plot", "sources"),
    ("experiments", "report", "trace"),
    ("cli",),
    ("__main__",),
)
"""Modules and folders from the bottom up: each imports only from layers below it."""


def unit_of(module: str) -> str:
    """Return the entry of LAYERS that a module (without the leading ``optsched.``) belongs to."""
    known = {name for layer in LAYERS for name in layer}
    return module if module in known else module.split(".")[0]


def imports() -> set[tuple[str, str]]:
    """Return (importing module, imported module) pairs, imports inside functions included."""
    found = set()
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if not module:
            continue  # the package itself only names modules as text
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative imports hide the direction"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.startswith("optsched."):
                    found.add((module, name.removeprefix("optsched.")))
    return found


def test_imports_go_one_way() -> None:
    height = {name: k for k, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for module, imported in sorted(imports()):
        source, target = unit_of(module), unit_of(imported)
        if target.startswith("__") or source == target:
            continue
        assert source in height, f"{source}: new; give it its place in LAYERS"
        assert target in height, f"{target}: new; give it its place in LAYERS"
        if height[target] >= height[source]:
            wrong.append(f"{module} imports {imported}")
    assert not wrong


def test_policies_and_formulations_know_nothing_of_each_other_nor_of_output() -> None:
    forbidden = {
        "policies": {"formulations", "solvers", "plot", "io", "cli"},
        "formulations": {"policies", "simulate", "plot", "io", "cli"},
    }
    for module, imported in sorted(imports()):
        banned = forbidden.get(module.split(".")[0], set())
        assert imported.split(".")[0] not in banned, f"{module} imports {imported}"


def loaded_after(code: str) -> set[str]:
    """Return the top-level packages that are loaded after running code in a new interpreter."""
    tail = "\nimport sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    result = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


HEAVY = {
    "numba", "pandas", "matplotlib", "highspy", "ortools", "pulp", "pydantic", "scipy", "pyarrow",
    "pooch", "requests",
}  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "import optsched",
        "import optsched.cli",
        """
import sys
sys.argv = ["optsched", "--help"]
from optsched.cli import main
try:
    main()
except SystemExit as stop:
    assert stop.code == 0
""",
    ],
    ids=["package", "cli", "help"],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    assert not loaded_after(code) & HEAVY


def test_public_names_exist() -> None:
    for name in optsched.__all__:
        assert getattr(optsched, name) is not None
    assert set(optsched.__all__) <= set(dir(optsched))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = optsched.nothing


def test_solvers_can_be_loaded_in_either_order() -> None:
    loaded_after("import highspy; from ortools.sat.python import cp_model")
    loaded_after("from ortools.sat.python import cp_model; import highspy")


@pytest.mark.skipif(not (ROOT.parent / "pyproject.toml").is_file(), reason="not a checkout")
def test_the_wheel_holds_models_instances_and_the_typing_marker(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            sys.executable, "-m", "build", "--wheel", "--no-isolation",
            "--outdir", str(tmp_path), str(ROOT.parent),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "optsched/py.typed" in names
    assert "optsched/report/report.html.jinja" in names
    for folder in ("models", "instances"):
        shipped = {p.name for p in (ROOT.parent / folder).iterdir() if p.is_file()}
        assert shipped
        assert {f"optsched/_data/{folder}/{name}" for name in shipped} <= names
    modules = {f"optsched/{p.relative_to(ROOT).as_posix()}" for p in ROOT.rglob("*.py")}
    assert modules <= names
    assert not [n for n in names if "__pycache__" in n or n.startswith("tests")]
    metadata = next(n for n in names if n.endswith("entry_points.txt"))
    assert "optsched = optsched.cli:main" in zipfile.ZipFile(wheel).read(metadata).decode()
