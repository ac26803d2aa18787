"""optsched: how good could an LLM-serving schedule have been, with a proof.

    >>> import optsched
    >>> instance = optsched.Instance([0, 0], [1, 2], [3, 1], kv_capacity=6)
    >>> evaluation = optsched.evaluate(instance, optsched.simulate(instance, "mc-sf"))
    >>> evaluation.metrics["tel"]
    4

Solvers, numba, pandas and matplotlib are imported on first use, so that importing the package
is cheap. The functions are bound eagerly because some share their module's name.
"""

from optsched import queueing
from optsched.compare import Comparison, compare
from optsched.cost import BatchCost, UnitCost, load_cost_model, shipped_models
from optsched.data import datasets, fetch_dataset
from optsched.errors import OptschedError, ViolationError
from optsched.evaluate import Evaluation, evaluate
from optsched.generate import generate
from optsched.instance import Instance, Limits
from optsched.io import read_instance, read_schedule, write_instance, write_schedule
from optsched.measured import Measured, read_measured, write_measured
from optsched.policies.base import Batch, Rules, View, Windows
from optsched.schedule import Schedule, from_batches, from_starts
from optsched.simulate import simulate
from optsched.solve import Result, solve
from optsched.timeline import Timeline, timeline
from optsched.traces import read_trace, read_trace_report
from optsched.version import __version__

__all__ = [
    "Batch",
    "BatchCost",
    "Comparison",
    "Evaluation",
    "Instance",
    "Limits",
    "Measured",
    "OptschedError",
    "Result",
    "Rules",
    "Schedule",
    "Timeline",
    "UnitCost",
    "View",
    "ViolationError",
    "Windows",
    "__version__",
    "compare",
    "datasets",
    "evaluate",
    "fetch_dataset",
    "from_batches",
    "from_starts",
    "generate",
    "load_cost_model",
    "queueing",
    "read_instance",
    "read_measured",
    "read_schedule",
    "read_trace",
    "read_trace_report",
    "shipped_models",
    "simulate",
    "solve",
    "timeline",
    "write_instance",
    "write_measured",
    "write_schedule",
]
