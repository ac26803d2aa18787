"""The registered experiments: all that the modules of `optsched.experiments.studies` define."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from optsched.experiments.base import Experiment
from optsched.problem.errors import InputError


@cache
def experiments() -> dict[str, Experiment]:
    """Return every experiment by its name, sorted by name."""
    studies = import_module("optsched.experiments.studies")
    found = [
        value
        for module in pkgutil.iter_modules(studies.__path__)
        for value in vars(import_module(f"{studies.__name__}.{module.name}")).values()
        if isinstance(value, Experiment)
    ]
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def get_experiment(name: str) -> Experiment:
    """Return an experiment by its name."""
    if name not in experiments():
        raise InputError(
            f"experiment: found {name!r}; expected one of {', '.join(experiments())}, or list"
        )

    return experiments()[name]
