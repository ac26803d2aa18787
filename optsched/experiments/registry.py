"""The experiments: those that the studies define, which lie beside the package, and ratios."""

import sys
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType

from optsched.experiments.base import Experiment, studies_folder
from optsched.experiments.ratios import RATIOS
from optsched.problem.errors import named
from optsched.problem.registry import modules_of

STUDIES = "optsched_studies"


def load_studies() -> ModuleType:
    """Return the package of the studies, which is called ``optsched_studies`` from then on."""
    if STUDIES not in sys.modules:
        spec = ModuleSpec(STUDIES, None, is_package=True)
        spec.submodule_search_locations = [str(studies_folder())]
        sys.modules[STUDIES] = module_from_spec(spec)

    return sys.modules[STUDIES]


@cache
def experiments() -> dict[str, Experiment]:
    """Return every experiment by its name, sorted by name."""
    load_studies()
    values = [value for module in modules_of(STUDIES) for value in vars(module).values()]
    found = {value.name: value for value in values if isinstance(value, Experiment)}
    found[RATIOS.name] = RATIOS
    return dict(sorted(found.items()))


def get_experiment(name: str) -> Experiment:
    """Return an experiment by its name."""
    return named("experiment", name, experiments())
