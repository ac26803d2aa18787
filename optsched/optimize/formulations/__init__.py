"""Mathematical models, one file each: data in, model, schedule out.

A file of this package is found by itself. It may define

- ``FORMULATION``, a `Formulation`;
- ``METHODS``, a mapping from the name of a formulation (its own or another file's) to a mapping
  of further methods, name to `Method`.

Files import their solvers when a method runs, so that listing costs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from optsched.optimize.formulations.base import (
    Answer,
    Formulation,
    Method,
    Task,
    automatic,
    check_method,
    demands,
)
from optsched.problem.errors import UsageError
from optsched.problem.registry import Registry, modules_of

__all__ = [
    "Answer",
    "Formulation",
    "Method",
    "Task",
    "automatic",
    "check_method",
    "demands",
    "formulations",
    "get",
]


@cache
def _registry() -> Registry[Formulation]:
    modules = list(modules_of(__name__, deep=True))
    own = [vars(module)["FORMULATION"] for module in modules if hasattr(module, "FORMULATION")]
    methods = {formulation.name: dict(formulation.methods) for formulation in own}
    for module in modules:
        for name, further in getattr(module, "METHODS", {}).items():
            twice = set(further) & set(methods[name])
            if twice:
                raise ValueError(f"{module.__name__}: methods {sorted(twice)} of {name} exist")
            methods[name] |= further
    found: Registry[Formulation] = Registry("formulation:", error=UsageError)
    for formulation in own:
        found.add(formulation.name, replace(formulation, methods=methods[formulation.name]))
    return found


def formulations() -> dict[str, Formulation]:
    """Return every formulation by name, each with all of its methods."""
    return _registry().all()


def get(name: str) -> Formulation:
    """Return a formulation by name.

    Raises
    ------
    UsageError
        There is none of that name; the message lists them.
    """
    return _registry().get(name)
