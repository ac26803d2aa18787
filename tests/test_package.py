"""The package as a whole: what may import what, what loads when, and what the wheel holds."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import optsched
from optsched.experiments.store import read
from optsched.files.schemas import HOME

ROOT = Path(optsched.__file__).resolve().parent

ROOMS = (
    "problem", "costs", "files", "workloads", "bounds", "judge", "policies", "optimize",
    "analysis", "show", "engines", "experiments", "cli",
)  # fmt: skip
"""The folders from the bottom up: each imports only from itself and from those before it."""


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Return the imports, the attributes and the constants of a file, which is parsed once."""
    kinds = ast.Import, ast.ImportFrom, ast.Attribute, ast.Constant
    every = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [node for node in every if isinstance(node, kinds)]


def imports(*, later: bool = False) -> set[tuple[str, str]]:
    """Return (importing module, imported module) pairs, imports inside functions included.

    `later`: with modules and packages that are named as text, to be imported by registries, by
    `import_module` or by another process.
    """
    found = set()
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if not module:
            continue  # the package itself only names modules as text
        for node in nodes_of(file):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative imports hide the direction"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif later and isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = re.findall(r"\A optsched(?:\.\w+)+ (?=\.?\Z)", node.value, re.VERBOSE)
            for name in names:
                if name.startswith("optsched."):
                    found.add((module, name.removeprefix("optsched.")))
    return found


def test_the_package_has_these_rooms_and_no_others() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir()} - {"__pycache__"} == set(ROOMS)


def test_imports_between_rooms_go_one_way() -> None:
    """`ROOMS` is in order: a folder imports from itself and from those before it."""
    height = {room: place for place, room in enumerate(ROOMS)}
    wrong = [
        f"{module} imports {imported}"
        for module, imported in sorted(imports(later=True))
        if (room := module.split(".")[0]) in height
        and height.get(imported.split(".")[0], -1) > height[room]
    ]
    assert not wrong


def test_judge_and_bounds_do_not_know_each_other() -> None:
    both = {"bounds", "judge"}
    met = {(a, b) for a, b in imports(later=True) if {a.split(".")[0], b.split(".")[0]} == both}
    assert not met


def test_no_files_import_each_other_in_a_circle() -> None:
    """Modules that are named as text alone, for registries to import, are left out."""
    found = pkgutil.walk_packages(optsched.__path__, "optsched.")
    files = {info.name.removeprefix("optsched.") for info in found}
    needs: dict[str, set[str]] = {}
    for module, imported in imports():
        # `from package.module import name` names a value: the file is what stands before it.
        file = imported if imported in files else imported.rpartition(".")[0]
        if file in files and file != module:
            needs.setdefault(module, set()).add(file)
    # Take away the files that need no other one, and those that no other one needs, again and
    # again. What stays is in a circle, or between two.
    while free := {
        file
        for file, needed in needs.items()
        if not needed & needs.keys() or file not in set().union(*needs.values())
    }:
        for file in free:
            del needs[file]
    assert not needs


def test_releases_are_read_where_they_are_given_or_from_an_evaluation() -> None:
    """A release may depend on the schedule, so `arrival` is for what makes and reads instances."""
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        if file.relative_to(ROOT).parts[0] in ("problem", "workloads"):
            continue
        for node in nodes_of(file):
            if not isinstance(node, ast.Attribute) or node.attr != "arrival":
                continue
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else ""
            owner = node.value.id if isinstance(node.value, ast.Name) else owner
            # What is not called an instance has a column of arrivals of its own: the view of a
            # policy, the records of a loop, the requests as a bound or a formulation has them.
            if owner.endswith("instance"):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: {owner}.arrival")
    assert not wrong, "expected release_times, of the instance or of an evaluation"


def test_no_function_hides_the_module_that_it_is_in() -> None:
    for info in pkgutil.walk_packages(optsched.__path__, "optsched."):
        if info.name == "optsched.__main__":
            continue
        module = import_module(info.name)
        parent, _, leaf = info.name.rpartition(".")
        assert getattr(import_module(parent), leaf) is module, info.name


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
    "requests",
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
    with pytest.raises(AttributeError, match="optsched attribute nothing"):
        _ = optsched.nothing


def test_type_checkers_see_the_public_names_where_they_are() -> None:
    """The stub `__init__.pyi` imports each name from the module that has it."""
    stub = ast.parse(Path(optsched.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    seen = {
        alias.name: import_module(f"optsched.{node.module}")
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) == set(optsched.__all__)
    for name, module in seen.items():
        assert getattr(module, name) is getattr(optsched, name), name


def test_solvers_can_be_loaded_in_either_order() -> None:
    loaded_after("import highspy; from ortools.sat.python import cp_model")
    loaded_after("from ortools.sat.python import cp_model; import highspy")


checkout = pytest.mark.skipif(
    not (ROOT.parent / "pyproject.toml").is_file(), reason="not a checkout"
)


@checkout
def test_what_describes_the_package_says_one_version_one_home_and_the_same_needs() -> None:
    """pyproject.toml, the recipe for conda and CITATION.cff; conda has other names for some."""
    yaml = pytest.importorskip("yaml")
    home = ROOT.parent
    project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((home / ".ci" / "recipe.yaml").read_text())
    citation = yaml.safe_load((home / "CITATION.cff").read_text())
    assert recipe["context"]["version"] == citation["version"] == optsched.__version__
    urls = project["urls"]
    assert {recipe["about"]["homepage"], citation["url"], urls["Homepage"]} == {HOME}
    repository = {recipe["about"]["repository"], citation["repository-code"], urls["Repository"]}
    assert len(repository) == 1

    names = {"lazy-loader": "lazy_loader", "matplotlib-base": "matplotlib"}
    names["ortools-python"] = "ortools"
    python, *needed = (one.split(" ") for one in recipe["requirements"]["run"])
    assert python[0] == "python"
    needs = [names.get(name, name) + versions for name, versions in needed]
    assert needs == project["dependencies"]


@checkout
@pytest.mark.whole
def test_the_wheel_holds_models_instances_and_the_typing_marker(tmp_path: Path) -> None:
    """Each file of the package, the library and the studies is in it, and it runs alone."""
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
    assert "optsched/show/report/report.html.jinja" in names
    for folder in ("models", "instances"):
        shipped = {p.name for p in (ROOT.parent / folder).iterdir() if p.is_file()}
        assert shipped
        assert {f"optsched/_data/{folder}/{name}" for name in shipped} <= names
    for kind in ("*.py", "*.pyi", "*.toml"):
        assert {f"optsched/{p.relative_to(ROOT).as_posix()}" for p in ROOT.rglob(kind)} <= names
    library = {p.relative_to(ROOT.parent) for p in (ROOT.parent / "instances/library").rglob("*.*")}
    assert {f"optsched/_data/{name.as_posix()}" for name in library} <= names
    studies = ROOT.parent / "benchmarks" / "studies"
    inside = {p.relative_to(studies).as_posix() for p in studies.rglob("*.py")}
    assert {f"optsched/_data/studies/{name}" for name in inside} <= names
    assert not [n for n in names if "__pycache__" in n or n.startswith("tests")]
    metadata = next(n for n in names if n.endswith("entry_points.txt"))
    assert "optsched = optsched.cli:main" in zipfile.ZipFile(wheel).read(metadata).decode()
    experiments_run_from(wheel, tmp_path)
    verified = subprocess.run(
        [sys.executable, "-P", "-m", "optsched", "library", "verify", "tiny", "--jobs", "1"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    # The library's family `tiny` has eight instances.
    assert verified.stdout == "instances: 8, failures: 0\n", verified.stderr


def experiments_run_from(wheel: Path, folder: Path) -> None:
    """Run the same trials from the unpacked wheel, in an empty folder, and in this checkout."""
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    words = ["experiment", "infermax-memory", "--trials", "2", "--set", "requests=8"]
    # Compiling takes longer than the few requests: loops run interpreted.
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    printed = []
    for name, home in (("wheel", folder / "unpacked"), ("checkout", ROOT.parent)):
        (folder / name).mkdir()
        result = subprocess.run(
            [sys.executable, "-P", "-m", "optsched", *words, "--out", "out"],
            cwd=folder / name, env={**environment, "PYTHONPATH": str(home)},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout)

    assert printed[0] == printed[1]
    wheels, ours = (folder / name / "out" / "results.csv" for name in ("wheel", "checkout"))
    assert wheels.read_bytes() == ours.read_bytes()
    # The code has one digest, so that either goes on with the other's store.
    stores = [read(folder / name / "out")[0] for name in ("wheel", "checkout")]
    assert stores[0].code == stores[1].code


@pytest.mark.whole
def test_the_python_of_the_first_pages_has_no_wrong_types(tmp_path: Path) -> None:
    from pages import ROOT, blocks

    pages = [ROOT / "README.md", ROOT / "docs/tutorial.md"]
    texts = [one.text for page in pages for one in blocks(page) if one.language == "python"]
    assert len(texts) >= 3  # there are blocks to look at
    files = [tmp_path / f"block_{k}.py" for k in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    for file in files:  # each alone: their names are their own
        command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", tmp_path, file]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert result.returncode == 0, result.stdout
