"""Named experiments, found by a registry, run trial by trial into a durable store.

A module of `optsched.experiments.studies` defines `Experiment` objects at its top level; nothing
else needs editing. `run_experiment` (in `optsched.experiments.runner`) runs one, `load` reads what
it found.
"""

from optsched.experiments.base import Claim, Experiment, Figure, Row
from optsched.experiments.registry import experiments, get_experiment
from optsched.experiments.results import load

__all__ = ["Claim", "Experiment", "Figure", "Row", "experiments", "get_experiment", "load"]
