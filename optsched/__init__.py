"""optsched: how good could an LLM-serving schedule have been, with a proof.

    >>> import optsched
    >>> instance = optsched.Instance([0, 0], [1, 2], [3, 1], kv_capacity=6)
    >>> evaluation = optsched.evaluate(instance, optsched.simulate(instance, "mc-sf"))
    >>> evaluation.metrics["tel"]
    4

Solvers, numba, pandas and matplotlib are imported on first use, so that importing the package
is cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from optsched.analysis import queueing
from optsched.analysis.compare import Comparison, compare
from optsched.costs.cost import BatchCost, UnitCost, load_cost_model, shipped_models
from optsched.files.measured import Measured, read_measured, write_measured
from optsched.files.read_write import read_instance, read_schedule, write_instance, write_schedule
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.judge.timeline import Timeline, timeline
from optsched.optimize.bound import BoundResult, bound
from optsched.optimize.solve import Result, solve
from optsched.policies.base import Batch, Rules, View, Windows
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import OptschedError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import Schedule, from_batches, from_starts
from optsched.problem.version import __version__
from optsched.workloads.datasets import datasets, fetch_dataset
from optsched.workloads.generate import generate
from optsched.workloads.traces import read_trace, read_trace_report

__all__ = [
    "Batch",
    "BatchCost",
    "BoundResult",
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
    "bound",
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

_MOVED = {
    "cost": "costs.cost",
    "errors": "problem.errors",
    "fit": "costs.fit",
    "forecast": "problem.forecast",
    "hardware": "costs.hardware",
    "instance": "problem.instance",
    "io": "files.read_write",
    "load": "analysis.rates",
    "measured": "files.measured",
    "plot": "show.plot",
    "predict": "workloads.predict",
    "queueing": "analysis.queueing",
    "ratio": "analysis.ratio",
    "report": "show.report",
    "schedule": "problem.schedule",
    "theory": "analysis.theory",
    "traces": "workloads.traces",
}
"""Modules that the documentation of version 0.1.0 named, and where they are now.

Users' policies and notebooks import them by the old name, which stays the same module.
"""


class _Alias(Loader):
    """Answers an import of an old name with the module of the new one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.name)
        self.spec = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        head, dot, tail = rest.partition(".")
        if package != "optsched" or head not in _MOVED:
            return None
        return ModuleSpec(fullname, _Alias(f"optsched.{_MOVED[head]}{dot}{tail}"))


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())  # before the one that would load a second copy
