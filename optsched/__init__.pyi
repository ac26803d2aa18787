"""The public names, for type checkers and for `__init__.py`, which loads them when asked for."""

from .analysis import library as library
from .analysis.capacity import Capacity as Capacity, capacity as capacity
from .analysis.compare import Comparison as Comparison, compare as compare
from .analysis.ratio import (
    Study as Study,
    WorstCase as WorstCase,
    ratios as ratios,
    worst_case as worst_case,
)
from .analysis.score import Score as Score, score as score
from .analysis.splits import Splits as Splits, splits as splits
from .analysis.warm import warm_up as warm_up
from .analysis.why import Why as Why, why as why
from .bounds import list_bounds as list_bounds
from .bounds.verify import verify as verify
from .costs.cost import (
    BatchCost as BatchCost,
    shipped_models as shipped_models,
)
from .costs.fit import fit as fit
from .costs.fleet import Fleet as Fleet
from .costs.load import load_cost_model as load_cost_model
from .costs.machine import Link as Link, Machine as Machine
from .files.measured import (
    Measured as Measured,
    read_measured as read_measured,
    write_measured as write_measured,
)
from .files.read_write import (
    read_instance as read_instance,
    read_schedule as read_schedule,
    write_instance as write_instance,
    write_schedule as write_schedule,
)
from .judge.evaluate import evaluate as evaluate
from .judge.evaluation import Evaluation as Evaluation
from .judge.timeline import Timeline as Timeline, timeline as timeline
from .optimize.bound import BoundResult as BoundResult, bound as bound
from .optimize.model import Model as Model, model as model
from .optimize.solve import Result as Result, solve as solve
from .policies import list_policies as list_policies
from .policies.base import (
    Batch as Batch,
    Rules as Rules,
    View as View,
    Windows as Windows,
)
from .policies.run import Run as Run, run as run
from .problem.errors import (
    OptschedError as OptschedError,
    ViolationError as ViolationError,
)
from .problem.instance import Instance as Instance, Limits as Limits
from .problem.metrics import list_metrics as list_metrics
from .problem.objective import Objective as Objective
from .problem.schedule import (
    Schedule as Schedule,
    from_batches as from_batches,
    from_starts as from_starts,
)
from .problem.version import __version__ as __version__
from .show import plot as plot
from .workloads.datasets import datasets as datasets, fetch_dataset as fetch_dataset
from .workloads.drafts import with_drafts as with_drafts
from .workloads.generate import generate as generate
from .workloads.predict import predict as predict
from .workloads.problem import Problem as Problem
from .workloads.traces import (
    read_trace as read_trace,
    read_trace_report as read_trace_report,
)

__all__: list[str]
