"""Mathematical models of scheduling, and the methods that solve them.

Every file of this package is found automatically. It may define

- ``FORMULATION``, a `Formulation`;
- ``METHODS``, further methods for its own or another file's formulation: a mapping from the
  formulation's name to a mapping from method names to `Method`.

Files import their solvers only when a method runs, so listing the methods costs nothing.
"""

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
    lacks_of,
)
from optsched.problem.errors import UsageError
from optsched.problem.registry import Registry, modules_of


@cache
def _registry() -> Registry[Formulation]:
    """Return the formulations of all files, each with the methods that any file adds to it."""
    modules = list(modules_of(__name__, deep=True))
    forms = [vars(module)["FORMULATION"] for module in modules if hasattr(module, "FORMULATION")]
    methods = {formulation.name: dict(formulation.methods) for formulation in forms}

    for module in modules:
        for name, further in getattr(module, "METHODS", {}).items():
            defined_twice = set(further) & set(methods[name])
            if defined_twice:
                raise ValueError(
                    f"{module.__name__}: found second methods {sorted(defined_twice)} of {name}; "
                    "expected new names"
                )

            methods[name] |= further

    registry: Registry[Formulation] = Registry("formulation:", error=UsageError)
    for formulation in forms:
        registry.add(formulation.name, replace(formulation, methods=methods[formulation.name]))

    return registry


def formulations() -> dict[str, Formulation]:
    """Return every formulation by name, each with all of its methods."""
    return _registry().all()


def get(name: str) -> Formulation:
    """Return a formulation by name.

    Parameters
    ----------
    name : str
        For example ``"hindsight"``.
    """
    return _registry().get(name)
