"""The experiments that the studies define, which lie beside the package and not in it."""

from __future__ import annotations

import sys
from functools import cache
from importlib import resources
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from optsched.experiments.base import Experiment
from optsched.problem.errors import InputError
from optsched.problem.registry import modules_of

STUDIES = "optsched_studies"


def studies_folder() -> Path:
    """Return the folder of the studies, in a checkout or an installed wheel.

    Returns
    -------
    Path
    """
    inside = Path(str(resources.files("optsched"))) / "_data" / "studies"
    beside = Path(__file__).resolve().parents[2] / "benchmarks" / "studies"
    return inside if inside.is_dir() else beside


def load_studies() -> ModuleType:
    """Return the package of the studies, which is called ``optsched_studies`` from then on.

    Returns
    -------
    module
    """
    if STUDIES not in sys.modules:
        folder = studies_folder()
        spec = spec_from_file_location(
            STUDIES, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[STUDIES] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[STUDIES])

    return sys.modules[STUDIES]


@cache
def experiments() -> dict[str, Experiment]:
    """Return every experiment by its name, sorted by name.

    Returns
    -------
    dict of str to Experiment
    """
    load_studies()
    found = [
        value
        for module in modules_of(STUDIES)
        for value in vars(module).values()
        if isinstance(value, Experiment)
    ]
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def get_experiment(name: str) -> Experiment:
    """Return an experiment by its name.

    Parameters
    ----------
    name : str

    Returns
    -------
    Experiment

    Raises
    ------
    InputError
        There is no experiment of that name.
    """
    if name not in experiments():
        raise InputError(
            f"experiment: found {name!r}; expected one of {', '.join(experiments())}, or list"
        )

    return experiments()[name]
