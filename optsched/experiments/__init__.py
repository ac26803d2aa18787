"""Named experiments, which run trial by trial and keep their results in a durable store.

The studies are files in ``benchmarks/studies`` that define `Experiment` objects at their top level.
The registry finds them there, so that no other file needs editing. `run_experiment` (in
`optsched.experiments.runner`) runs an experiment, and `load` reads its results.
"""

from optsched.experiments.base import Claim, Experiment, Figure, Row
from optsched.experiments.registry import experiments, get_experiment, load_studies
from optsched.experiments.results import load
