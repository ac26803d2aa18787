"""Machine code that is kept on disk is thrown away when any source that it depends on changes.

A small package is written that is called as ours is, with a copy of our kernel.py; processes run
it, change its files and run it again.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import optsched.problem.kernel as kernel

FILES = {
    "__init__.py": "",
    "problem/__init__.py": "",
    "unit.py": "UNIT = 1\n",
    "inner.py": """
from optsched.problem.kernel import njit
from optsched.unit import UNIT

@njit
def inner(x):
    return x + UNIT
""",
    "outer.py": """
from optsched.inner import (
    inner,
)
from optsched.problem.kernel import njit

@njit(nogil=True)
def outer(x):
    return 10 * inner(x)
""",
}
PRINT = """
from optsched.outer import outer
value = outer(2)
print(value, sum(outer.stats.cache_hits.values()))
"""


def package(folder: Path) -> Path:
    """Write a package of the same name, whose compiled ``outer`` calls ``inner``."""
    for name, text in FILES.items():
        path = folder / "optsched" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in (
        "kernel.py",
        "budget.py",
        "errors.py",
        "notes.py",
    ):  # the clock of limits is in budget
        shutil.copy(Path(kernel.__file__).with_name(name), folder / "optsched/problem" / name)
    return folder


def outcome(folder: Path, program: str = PRINT) -> str:
    """Return the value of ``outer(2)`` in a new process, and how often it was found on disk."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.whole  # nine processes, most of which compile
def test_a_change_in_another_file_is_noticed_and_nothing_else_compiles_again(
    tmp_path: Path,
) -> None:
    # An outcome is ``outer(2)`` = 10 * inner(2), and how often machine code was found on disk.
    folder = package(tmp_path)
    assert outcome(folder) == "30 0"  # 10 * (2 + 1)
    assert outcome(folder) == "30 1"
    (folder / "optsched/unrelated.py").write_text("UNIT = 2\n")
    assert outcome(folder) == "30 1"
    inner = folder / "optsched/inner.py"
    inner.write_text(inner.read_text().replace("x + UNIT", "x - UNIT"))
    assert outcome(folder) == "10 0"  # 10 * (2 - 1)
    (folder / "optsched/unit.py").write_text("UNIT = 7\n")  # not compiled itself
    assert outcome(folder) == "-50 0"  # 10 * (2 - 7)
    assert outcome(folder) == "-50 1"
    # The same text at another time is no change: a second checkout of the same commit.
    os.utime(folder / "optsched/unit.py", (1, 1))
    assert outcome(folder) == "-50 1"


@pytest.mark.whole
def test_what_is_compiled_after_an_edit_in_a_running_process_is_not_kept(tmp_path: Path) -> None:
    # The process has `unit` in memory as it was, with 1, and imports `outer` after the edit.
    folder = package(tmp_path)
    edit = "open(optsched.unit.__file__, 'w').write('UNIT = 7')"
    old = f"import optsched.unit, optsched.problem.kernel\n{edit}\n{PRINT}"
    assert outcome(folder, old) == "30 0"
    assert outcome(folder) == "90 0"  # 10 * (2 + 7)
    assert outcome(folder) == "90 1"


def test_it_runs_as_plain_python_where_numba_is_told_so(tmp_path: Path) -> None:
    """`outer` stays a plain function then; 10 * (2 + 1) = 30."""
    folder = package(tmp_path)
    program = "from optsched.outer import outer\nprint(type(outer).__name__, outer(2))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder), "NUMBA_DISABLE_JIT": "1"},
    )  # fmt: skip
    assert (result.stdout.strip(), result.stderr) == ("function 30", "")


def test_the_package_compiles_by_this_alone() -> None:
    root = Path(kernel.__file__).parents[1]
    own = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "numba.njit" in (text := path.read_text()) or "from numba import njit" in text
    ]
    assert own == ["problem/kernel.py"]


def test_the_mark_sees_all_that_compiled_modules_import() -> None:
    # An import inside a function serves plain Python, which is not kept on disk.
    root = Path(kernel.__file__).parents[2]
    for path in (root / "optsched").rglob("*.py"):
        text = path.read_text()
        if "problem.kernel import njit" not in text:
            continue
        wanted = set()
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                assert not [name for name in node.names if name.name.startswith("optsched")], path
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                place = root.joinpath(*str(node.module).split("."))
                inside = [place / f"{name.name}.py" for name in node.names]
                wanted |= {place.with_suffix(".py"), place / "__init__.py", *inside}
        ours = {str(file) for file in wanted if file.is_file() and root in file.parents}
        assert kernel._imports_of(str(path)) >= ours, path


NOWHERE = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
"""A full disk: nothing can be written to any file, whoever one is."""


def said(folder: Path, home: Path, *, full: bool = False, **variables: str) -> tuple[str, str]:
    """Return what a new process of a user with some home prints, and what it warns of.

    `full`: it can write to no file. The two numbers printed are those of `outcome`.
    """
    program = "import resource\n" + NOWHERE * full + PRINT
    environment = {name: text for name, text in os.environ.items() if "CACHE" not in name}
    environment |= {"PYTHONPATH": str(folder), "HOME": str(home), **variables}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder,
        env=environment, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr


@pytest.mark.whole  # nine processes
def test_machine_code_is_read_wherever_it_is_and_written_where_it_can_be(tmp_path: Path) -> None:
    home, nobody, given = tmp_path / "home", Path(os.devnull) / "home", tmp_path / "given"
    ours, theirs = package(tmp_path / "ours"), package(tmp_path / "theirs")
    # "30 0": 10 * (2 + 1), no machine code found on disk; "30 1": once.
    # Nowhere at all: it runs, and says so once although two loops are lost.
    value, words = said(ours, home, full=True)
    assert value == "30 0"
    assert words.count("compiled loops cannot be kept") == 1
    assert f"{home}/.cache" in words
    assert "set NUMBA_CACHE_DIR" in words
    # Beside the package, although its user has no home; then there, where nothing can be written.
    assert said(ours, nobody) == ("30 0", "")
    assert said(ours, nobody, full=True) == ("30 1", "")
    assert said(ours, home, full=True, NUMBA_CACHE_DIR=str(given)) == ("30 1", "")

    # A package that others have installed without compiling.
    for part in (theirs / "optsched", theirs / "optsched/problem"):
        (part / "__pycache__").write_text("no folder can be made here")
    assert said(theirs, nobody)[0] == "30 0"
    assert "__pycache__: " in said(theirs, nobody)[1]
    assert said(theirs, nobody, NUMBA_CACHE_DIR=str(given)) == ("30 0", "")
    assert said(theirs, home) == ("30 0", "")
    assert said(theirs, home, full=True) == ("30 1", "")


@pytest.mark.whole
def test_a_file_of_machine_code_that_was_cut_off_is_compiled_again(tmp_path: Path) -> None:
    # As in `outcome`: 10 * (2 + 1), compiled anew (0) or found on disk (1).
    folder = package(tmp_path)
    assert outcome(folder) == "30 0"
    for name in ("*.nbc", "*.nbi"):
        for file in folder.rglob(name):
            file.write_bytes(file.read_bytes()[:20])
        assert outcome(folder) == "30 0", name
        assert outcome(folder) == "30 1", name


def test_machine_code_is_never_that_of_another_signature_or_source(tmp_path: Path) -> None:
    # What two processes leave that write at once, or one that is killed between index and data.
    from numba.core.caching import IndexDataCacheFile

    def files(stamp: str) -> kernel.Files:
        return kernel.Files([IndexDataCacheFile(str(tmp_path), "f", stamp)])

    old, new = files("old"), files("new")
    old.save("integers", "code of old integers")
    first, second = tmp_path / "f.1.nbc", tmp_path / "f.2.nbc"
    stale = first.read_bytes()
    new.save("integers", "code of integers")
    new.save("reals", "code of reals")
    assert (new.load("integers"), new.load("reals")) == ("code of integers", "code of reals")
    assert old.load("integers") is None
    shutil.copy(first, second)  # the file that is said to have reals has integers
    assert new.load("reals") is None
    first.write_bytes(stale)  # the file that is said to be of the new source is of the old one
    assert new.load("integers") is None
    new.save("reals", "code of reals")
    assert new.load("reals") == "code of reals"


@pytest.mark.whole
def test_machine_code_of_a_type_that_has_been_renamed_is_compiled_again(tmp_path: Path) -> None:
    # A named tuple by another name is another type; `outer(2)` is 2 + 28 with both, never found.
    folder = package(tmp_path)
    text = """
from typing import NamedTuple
from optsched.problem.kernel import njit

class Pair(NamedTuple):
    a: int
    b: int

@njit
def add(pair):
    return pair.a + pair.b

@njit
def outer(x):
    return add(Pair(x, 28))
"""
    for name in ("Pair", "Couple"):
        (folder / "optsched/outer.py").write_text(text.replace("Pair", name))
        assert outcome(folder) == "30 0"
