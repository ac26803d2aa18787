"""Registries of named values that are found in the modules of a package, not listed by hand."""

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Generic, TypeVar

from optsched.problem.errors import InputError, OptschedError, in_words, named
from optsched.problem.notes import warn

T = TypeVar("T")


def modules_of(package: str, *, deep: bool = False) -> Iterator[ModuleType]:
    """Import and yield a package's modules by name, but not ``..._kernel``, which load numba."""
    path = import_module(package).__path__
    walk = pkgutil.walk_packages if deep else pkgutil.iter_modules  # with the packages in it or not
    for info in sorted(walk(path, f"{package}."), key=lambda info: info.name):
        if not info.name.endswith("_kernel") and (deep or not info.ispkg):
            yield import_module(info.name)


def _maker_of(value: object) -> object:
    """Return what identifies the function that makes a value, or else the value itself."""
    make = getattr(value, "make", None)
    return (make.__module__, make.__qualname__) if make is not None else id(value)


class Registry(Generic[T]):
    """Values by name. The modules of a package are imported when a value is first needed.

    A module registers its values in one of two ways. It calls `add`, usually in a decorator, or
    it holds values of type `kind` at its top level, each with an attribute ``name``. Without a
    `package` only `add` registers any. `what` is what errors call a value.

    Other packages add to it by entry points of the group `plugins`. Each names a module, which
    registers its values in the same two ways; without a `package` it names a value. One that fails
    to load, or that takes a name which there is, is left out with a warning.
    """

    def __init__(
        self,
        what: str,
        package: str | None = None,
        kind: type[T] | None = None,
        *,
        error: Callable[[str], OptschedError] = InputError,
        plugins: str | None = None,
    ) -> None:
        self._what, self._package, self._kind, self._error = what, package, kind, error
        self._values: dict[str, T] = {}
        self._plugins = plugins
        self._complete = package is None and plugins is None

    def add(self, name: str, value: T) -> T:
        """Register a value and return it. A decorator that runs again replaces its former value."""
        known = self._values.get(name, value)
        if known is not value and _maker_of(known) != _maker_of(value):
            raise ValueError(f"{self._what} {name!r}: found two of that name; expected one")

        self._values[name] = value
        return value

    def all(self) -> dict[str, T]:
        """Return every value by name, sorted by name."""
        if not self._complete:
            if self._package is not None:
                for module in modules_of(self._package):
                    self._collect(module)

            self._complete = True  # before the plug-ins, which may call this method themselves
            if self._plugins is not None:
                self._add_plugins(self._plugins)

        return dict(sorted(self._values.items()))

    def get(self, name: str) -> T:
        """Return a value by name."""
        return named(self._what, name, self.all(), self._error)

    def _collect(self, module: ModuleType) -> None:
        """Add a module's values of the type `kind`. Importing it has added the others."""
        if self._kind is not None:
            for value in vars(module).values():
                if isinstance(value, self._kind):
                    self.add(str(value.name), value)  # type: ignore[attr-defined]

    def _add_plugins(self, group: str) -> None:
        """Add what other packages have, in the order of the names of their entry points."""
        for point in sorted(entry_points(group=group), key=lambda point: point.name):
            try:
                loaded = point.load()
                if self._package is None:
                    self.add(point.name, loaded)
                elif isinstance(loaded, ModuleType):
                    self._collect(loaded)
                else:
                    raise TypeError(f"found {loaded!r:.80}; expected a module")
            except (Exception, SystemExit) as error:  # another's package must not stop this one
                source = "" if point.dist is None else f" of the package {point.dist.name}"
                why = f"{point.name!r}{source} is left out: {in_words(error)}"
                warn(f"{group}: the entry point {why}", stacklevel=3)
