"""The public names, for type checkers and for `__init__.py`, which loads them when asked for."""

from optsched.analysis import library as library
from optsched.analysis.capacity import Capacity as Capacity, capacity as capacity
from optsched.analysis.compare import Comparison as Comparison, compare as compare
from optsched.analysis.score import Score as Score, score as score
from optsched.analysis.splits import Splits as Splits, splits as splits
from optsched.analysis.warm import warm_up as warm_up
from optsched.analysis.why import Why as Why, why as why
from optsched.costs.cost import (
    BatchCost as BatchCost,
    UnitCost as UnitCost,
    load_cost_model as load_cost_model,
    shipped_models as shipped_models,
)
from optsched.costs.machine import Link as Link, Machine as Machine, Pools as Pools
from optsched.engines.replay import replay as replay
from optsched.files.measured import (
    Measured as Measured,
    read_measured as read_measured,
    write_measured as write_measured,
)
from optsched.files.read_write import (
    read_instance as read_instance,
    read_schedule as read_schedule,
    write_instance as write_instance,
    write_schedule as write_schedule,
)
from optsched.judge.evaluate import evaluate as evaluate
from optsched.judge.evaluation import Evaluation as Evaluation
from optsched.judge.timeline import Timeline as Timeline, timeline as timeline
from optsched.optimize.bound import BoundResult as BoundResult, bound as bound
from optsched.optimize.solve import Result as Result, solve as solve
from optsched.policies.base import (
    Batch as Batch,
    Rules as Rules,
    View as View,
    Windows as Windows,
)
from optsched.policies.engine.simulate import simulate as simulate
from optsched.problem.errors import (
    OptschedError as OptschedError,
    ViolationError as ViolationError,
)
from optsched.problem.instance import Instance as Instance, Limits as Limits
from optsched.problem.schedule import (
    Schedule as Schedule,
    from_batches as from_batches,
    from_starts as from_starts,
)
from optsched.problem.version import __version__ as __version__
from optsched.show import plot as plot
from optsched.workloads.datasets import datasets as datasets, fetch_dataset as fetch_dataset
from optsched.workloads.generate import generate as generate
from optsched.workloads.traces import (
    read_trace as read_trace,
    read_trace_report as read_trace_report,
)

__all__: list[str]
