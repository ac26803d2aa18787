"""Compiling: numba's ``njit``, whose files on disk notice a change in what they were made from.

numba keeps machine code beside a module and compiles again when *that* file changes. A compiled
function holds copies of the functions of other modules that it calls, so after an edit or an update
elsewhere it would go on with old code and compute something else without a word. Here the mark of
what is kept is drawn from the text of the module and of all that it imports from this package.
What a process compiles after one of these files was edited under it is for that process alone.

Machine code is read from wherever there is some: the folder that NUMBA_CACHE_DIR names, beside the
package, where whoever installed it may have left it, and the user's cache. It is written to the
first of these that can be written, or else, with a word about it, to none.
"""

import gc
import os
import pickle
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b, sha1
from pathlib import Path
from typing import Any, NamedTuple

from optsched.problem.notes import warn

LOST = "compiled loops cannot be kept"
WAY_OUT = "every process compiles them again; set NUMBA_CACHE_DIR to a folder that can be written"
# What reading a file raises that was not written to its end, or that names a type that is gone.
_UNREADABLE = EOFError, pickle.UnpicklingError, AttributeError, ImportError
# How numba names the place of a function's environment.
_ENVIRONMENT = "_ZN08NumbaEnv"
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

    # The wrapper for callers in C is left out, since there are none.
    numba = _loaded()
    options |= {"_nrt": allocates, "no_cfunc_wrapper": True}
    dispatcher = numba.njit(function, **options)
    if dispatcher is function:  # with NUMBA_DISABLE_JIT
        return dispatcher

    # For compiled callers the function is compiled apart, without the wrapper for calls from
    # Python, which unpacks every field of the arguments. A constant counts as any value of its type
    # there, and a short integer as int64, so that this is done once for all of them.
    options |= {"no_cpython_wrapper": True, "pipeline_class": _inner_compiler()}
    inner, types = numba.njit(function, **options), numba.types
    short_integers = types.int8, types.int16, types.int32

    def widen(kind: Any) -> Any:
        """Return int64 for a short integer or a constant one, and other types as they are."""
        kind = types.unliteral(kind)
        return types.int64 if kind in short_integers else kind

    def inner_template(args: Sequence[Any], kws: dict[str, Any]) -> Any:
        keywords = {name: widen(kind) for name, kind in kws.items()}
        return inner.get_call_template([widen(kind) for kind in args], keywords)

    # numba asks the dispatcher by these two methods when a compiled caller calls the function. The
    # answer is the inner one; Python's own calls do not come this way.
    dispatcher.get_call_template = inner_template
    dispatcher.get_overload = inner.get_overload
    if os.path.isfile(function.__code__.co_filename):  # what a notebook defines is in no file
        dispatcher._cache = _cache_of(function)
        inner._cache = _cache_of(function, "-inner")

    return dispatcher


@cache
def _inner_compiler() -> Any:
    """Return numba's compiler for what only compiled code calls, which leaves the work to callers.

    numba optimizes a function with all that it calls, makes machine code of it, and then does both
    again in every caller, where this code is linked in. Here only the last of them does: what is
    called inside stays as it was typed, and is optimized where it is used. It uses names that numba
    keeps to itself, so without them this is numba's own compiler, which does the same more slowly.
    """
    from llvmlite import binding
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler

    parts = "_get_module_for_linking", "_finalize_dynamic_globals", "_finalize_final_module"
    if not all(hasattr(JITCodeLibrary, name) for name in parts):  # in another version of numba
        return Compiler

    class UnoptimizedLibrary(JITCodeLibrary):
        """The code of a function and of what it calls, as LLVM's text: callers link it in."""

        def finalize(self) -> None:
            """Link in what is called, and skip numba's two rounds of optimization."""
            linked = self._final_module
            for library in dict.fromkeys(self._linking_libraries):
                if hasattr(library, "_reload_init"):  # not in numba 0.60
                    self._reload_init.update(library._reload_init)
                linked.link_in(library._get_module_for_linking(), preserve=True)

            # Two callees may have linked in the same function, and of equal ones LLVM keeps one.
            for defined in linked.functions:
                if not defined.is_declaration and defined.linkage == binding.Linkage.external:
                    defined.linkage = "linkonce_odr"

            self._finalize_dynamic_globals()
            # Callers link in the whole code. What is compiled and loaded here has only the
            # variables in which numba keeps the environments of functions.
            empty = str(self._codegen._create_empty_module(self.name))
            variables = [str(v) for v in linked.global_variables if v.name.startswith(_ENVIRONMENT)]
            self._shared_module = linked
            self._final_module = binding.parse_assembly("\n".join([empty, *variables]))
            self._finalize_final_module()

    class InnerCompiler(Compiler):
        """numba's compiler, which puts its result into an `UnoptimizedLibrary`."""

        def compile_extra(self, function: Any) -> Any:
            codegen = self.state.targetctx.codegen()
            self.state.library = UnoptimizedLibrary(codegen, function.__qualname__)
            self.state.library.enable_object_caching()
            return super().compile_extra(function)

    return InnerCompiler


def plain(function: Any) -> Any:
    """Return a compiled function as it is written, for callers that are not compiled."""
    return getattr(function, "py_func", function)


UNKEPT: list[str] = []
"""Why what this process compiled could not be kept: the folders, and what the system said."""


class _Code(NamedTuple):
    """Machine code as it is kept: the mark of its sources and its signature go with it."""

    stamp: str
    key: Any
    code: Any


class Files:
    """A function's machine code in several folders, as numba's cache asks for it.

    `files`: numba's own for each folder, the one to write to first. An index there names a file by
    signature, and is written before it. Of two processes that write at once, or of one that is
    killed, an index can stay that names the code of another signature or of older sources, so each
    file says what it is the code of.
    """

    def __init__(self, files: Sequence[Any]) -> None:
        self._files = files

    def load(self, key: Any) -> Any:
        """Return the machine code of a signature from the first folder that has it, or None."""
        for file in self._files:
            try:
                kept = file.load(key)
                if type(kept) is _Code and (kept.stamp, kept.key) == (file._source_stamp, key):
                    return kept.code
            except OSError:  # a folder that may not be read
                continue
            except _UNREADABLE:
                with suppress(OSError):
                    file.flush()  # forget the index, so that the next compilation writes it anew

        return None

    def save(self, key: Any, code: Any) -> None:
        """Write the machine code of a signature to the first folder that takes it."""
        refused = []
        for file in self._files:
            folder = os.path.dirname(file._index_path)
            try:
                os.makedirs(folder, exist_ok=True)
                file.save(key, _Code(file._source_stamp, key, code))
                return
            except (OSError, *_UNREADABLE) as error:
                refused.append(f"{folder}: {getattr(error, 'strerror', None) or error}")

        if not UNKEPT:  # what is true of one loop is true of all
            UNKEPT.extend(refused)
            warn(f"{LOST} ({'; '.join(UNKEPT)}); {WAY_OUT}", stacklevel=1)


class _Beside:
    """Where numba's cache is for a function: beside its source, whether that can be written or not.

    numba's own locators refuse a folder that they cannot write, and then to compile at all.
    """

    def __init__(self, function: Any, source: str) -> None:
        self._py_file, self._line = source, function.__code__.co_firstlineno

    from_function = classmethod(lambda cls, function, source: cls(function, source))

    def get_cache_path(self) -> str:
        return os.path.join(os.path.dirname(self._py_file), "__pycache__")

    def get_source_stamp(self) -> str:
        return mark(self._py_file)

    def get_disambiguator(self) -> str:
        return str(self._line)

    def ensure_cache_path(self) -> None:
        """Do nothing: `Files` makes a folder when there is something to keep."""


def _cache_of(function: Any, kind: str = "") -> Any:
    """Return numba's cache of a function, but with `Files`, whose names end with ``kind``."""
    from numba.core import caching
    from numba.misc.appdirs import AppDirs

    impl = type("Code", (caching.CompileResultCacheImpl,), {"_locator_classes": (_Beside,)})
    cache = type("Cache", (caching.FunctionCache,), {"_impl_class": impl})(function)
    stamp = cache._impl.locator.get_source_stamp()
    beside = os.path.abspath(cache.cache_path)
    # The name that numba gives a folder of machine code that is not beside the source.
    source = os.path.dirname(beside)
    name = f"{os.path.basename(source)}_{sha1(source.encode()).hexdigest()}"

    # In the order in which they are read, and tried when there is something to write.
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    user = AppDirs(appname="numba", appauthor=False).user_cache_dir
    folders = [os.path.join(os.path.abspath(chosen), name)] if chosen else []
    folders.append(beside)
    if os.path.isabs(user):  # it begins with ~ where there is no home
        folders.append(os.path.join(user, name))

    base = cache._impl.filename_base + kind
    cache._cache_file = Files([caching.IndexDataCacheFile(path, base, stamp) for path in folders])
    return cache


def load() -> None:
    """Load what numba's first loop would, which takes half a second."""
    _loaded()
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


@cache
def _loaded() -> Any:
    """Load numba. It stops the clock of all limits while it compiles."""
    import numba
    from numba.core.event import Listener, register

    # Not at the top, where it would be a source that every compiled loop depends on.
    from optsched.problem.budget import work_time

    class Compiling(Listener):
        """What happens while numba compiles; a compilation may begin within another."""

        depth = 0
        collects = False  # whether garbage was collected before the outer compilation began

        def on_start(self, event: Any) -> None:
            self.depth += 1
            if self.depth == 1:  # numba keeps what it builds, and the search takes a tenth of time
                self.collects = gc.isenabled()
                gc.disable()

            work_time.stop()

        def on_end(self, event: Any) -> None:
            self.depth -= 1
            if self.depth == 0 and self.collects:
                gc.collect(1)  # what this has left would be searched soon, while the clock goes
                gc.enable()

            work_time.go()

    register("numba:compile", Compiling())
    return numba


@cache
def mark(source: str) -> str:
    """Return a digest of a source file and of all of this package that it imports."""
    reached, to_read = {source}, [source]
    while to_read:
        new = _imports_of(to_read.pop()) - reached
        reached |= new
        to_read += new

    # A file that was edited since this process began may not be the one that it imported. Then
    # what it compiles is for it alone: nobody draws this mark again.
    written = [Path(path).stat().st_mtime for path in reached if Path(path).is_file()]
    if max(written, default=0.0) > _BEGAN:
        return os.urandom(16).hex()

    texts = "\0".join(_text(path) for path in sorted(reached))
    return blake2b(texts.encode(), digest_size=16).hexdigest()


@cache
def _imports_of(source: str) -> frozenset[str]:
    """Return the files of this package that a source imports from at its top."""
    paths = set()
    for module, names in _IMPORT.findall(_text(source)):
        # ``from optsched.a.b import c``: the module b may be a file or a package, and c a module
        # in it. Of these paths those are kept at which there is a file.
        place = _ROOT.joinpath(*module.split("."))
        paths |= {place.with_suffix(".py"), place / "__init__.py"}
        paths |= {(place / name).with_suffix(".py") for name in re.findall(r"\w+", names)}

    return frozenset(str(path) for path in paths if path.is_file())


@cache
def _text(source: str) -> str:
    """Return a source's text, which does not change while the process lives."""
    path = Path(source)
    return path.read_text(encoding="utf-8") if path.is_file() else ""
