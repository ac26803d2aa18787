"""Mathematical models, one file each: data in, model, schedule out.

A file of this package is found by itself. It may define

- ``FORMULATION``, a `Formulation`;
- ``METHODS``, a mapping from the name of a formulation (its own or another file's) to a mapping
  of further methods, name to `Method`.

Files import their solvers when a method runs, so that listing costs nothing.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module

from optsched.optimize.formulations.base import (
    Answer,
    Formulation,
    Method,
    Task,
    check_method,
    demands,
)
from optsched.problem.errors import UsageError

__all__ = [
    "Answer",
    "Formulation",
    "Method",
    "Task",
    "check_method",
    "demands",
    "formulations",
    "get",
]


@cache
def _registry() -> dict[str, Formulation]:
    found: dict[str, Formulation] = {}
    further: dict[str, dict[str, Method]] = {}
    for info in sorted(pkgutil.walk_packages(__path__, f"{__name__}."), key=lambda info: info.name):
        if info.name.endswith("_kernel"):
            continue  # compiled loops, which load numba
        module = import_module(info.name)
        formulation = getattr(module, "FORMULATION", None)
        if formulation is not None:
            if formulation.name in found:
                raise ValueError(f"{module.__name__}: formulation {formulation.name} exists twice")
            found[formulation.name] = formulation
        for name, methods in getattr(module, "METHODS", {}).items():
            for key, method in methods.items():
                if key in further.setdefault(name, {}):
                    raise ValueError(f"{module.__name__}: method {key} of {name} exists twice")
                further[name][key] = method
    for name, methods in further.items():
        twice = set(methods) & set(found[name].methods)
        if twice:
            raise ValueError(f"formulation {name}: methods {sorted(twice)} exist twice")
        found[name] = replace(found[name], methods={**found[name].methods, **methods})
    return dict(sorted(found.items()))


def formulations() -> dict[str, Formulation]:
    """Return every formulation by name, each with all of its methods."""
    return dict(_registry())


def get(name: str) -> Formulation:
    """Return a formulation by name.

    Raises
    ------
    UsageError
        There is none of that name; the message lists them.
    """
    found = _registry()
    if name not in found:
        raise UsageError(f"formulation: {name!r} is unknown; known are {', '.join(found)}")
    return found[name]
