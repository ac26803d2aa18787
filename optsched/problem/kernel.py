"""Compiling: numba's ``njit``, whose files on disk notice a change in what they were made from.

numba keeps machine code beside a module and compiles again when *that* file changes. A compiled
function holds copies of the functions of other modules that it calls, so after an edit or an update
elsewhere it would go on with old code and compute something else without a word. Here the mark of
what is kept is drawn from the text of the module and of all that it imports from this package.
What a process compiles after one of these files was edited under it is for that process alone.
"""

import os
import re
import time
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

_BEGAN = time.time()
_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^from (optsched[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


def njit(function: Any = None, /, *, allocates: bool = True, **options: Any) -> Any:
    """Compile a function, and keep its machine code until a source that it depends on changes.

    `allocates`: whether it, or what it calls, makes or returns arrays. If not, references to arrays
    are not counted, which is half of the time of loops that call functions or use named tuples.
    """
    if function is None:
        return lambda function: njit(function, allocates=allocates, **options)

    numba = _loaded()
    dispatcher = numba.njit(function, cache=True, _nrt=allocates, **options)
    if dispatcher is not function:  # with NUMBA_DISABLE_JIT it is
        kept = dispatcher._cache._cache_file
        kept._source_stamp = (kept._source_stamp, mark(function.__code__.co_filename))

    return dispatcher


def plain(function: Any) -> Any:
    """Return a compiled function as it is written, for callers that are not compiled."""
    return getattr(function, "py_func", function)


@cache
def _loaded() -> Any:
    """Load numba. It stops the clock of all limits while it compiles."""
    import numba
    from numba.core.event import Listener, register

    # Not at the top, where it would be a source that every compiled loop depends on.
    from optsched.problem.budget import work_time

    class Compiling(Listener):
        def on_start(self, event: Any) -> None:
            work_time.stop()

        def on_end(self, event: Any) -> None:
            work_time.go()

    register("numba:compile", Compiling())
    return numba


@cache
def mark(source: str) -> str:
    """Return a digest of a source file and of all of this package that it imports."""
    reached, left = {source}, [source]
    while left:
        new = _imported(left.pop()) - reached
        reached |= new
        left += new

    written = [Path(path).stat().st_mtime for path in reached if Path(path).is_file()]
    if max(written, default=0.0) > _BEGAN:
        return os.urandom(16).hex()

    texts = "\0".join(_text(path) for path in sorted(reached))
    return blake2b(texts.encode(), digest_size=16).hexdigest()


@cache
def _imported(source: str) -> frozenset[str]:
    """Return the files of this package that a source imports from at its top."""
    paths = set()
    for module, names in _IMPORT.findall(_text(source)):
        place = _ROOT.joinpath(*module.split("."))
        inside = (place / name for name in re.findall(r"\w+", names))
        paths |= {place.with_suffix(".py"), place / "__init__.py"}
        paths |= {path.with_suffix(".py") for path in inside}

    return frozenset(str(path) for path in paths if path.is_file())


@cache
def _text(source: str) -> str:
    """Return a source's text, which does not change while the process lives."""
    path = Path(source)
    return path.read_text(encoding="utf-8") if path.is_file() else ""
