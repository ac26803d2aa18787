"""optsched: how good could an LLM-serving schedule have been, with a proof.

    >>> import optsched
    >>> instance = optsched.Instance([0, 0], [1, 2], [3, 1], kv_capacity=6)
    >>> evaluation = optsched.evaluate(instance, optsched.simulate(instance, "mc-sf"))
    >>> evaluation.metrics["tel"]
    4

Everything is loaded on first use, so that importing the package is fast.
"""

from __future__ import annotations

from importlib import import_module

# `typing` and `importlib.abc` take longer to load than all else before the command line is ready.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
    from optsched.optimize.tradeoff import Tradeoff as Tradeoff, tradeoff as tradeoff
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

_PUBLIC = {
    "analysis.capacity": "Capacity capacity",
    "analysis.compare": "Comparison compare",
    "analysis.score": "Score score",
    "analysis.splits": "Splits splits",
    "analysis.warm": "warm_up",
    "analysis.why": "Why why",
    "costs.cost": "BatchCost UnitCost load_cost_model shipped_models",
    "costs.machine": "Link Machine Pools",
    "files.measured": "Measured read_measured write_measured",
    "files.read_write": "read_instance read_schedule write_instance write_schedule",
    "engines.replay": "replay",
    "judge.evaluate": "evaluate",
    "judge.evaluation": "Evaluation",
    "judge.timeline": "Timeline timeline",
    "optimize.bound": "BoundResult bound",
    "optimize.solve": "Result solve",
    "optimize.tradeoff": "Tradeoff tradeoff",
    "policies.base": "Batch Rules View Windows",
    "policies.engine.simulate": "simulate",
    "problem.errors": "OptschedError ViolationError",
    "problem.instance": "Instance Limits",
    "problem.schedule": "Schedule from_batches from_starts",
    "problem.version": "__version__",
    "workloads.datasets": "datasets fetch_dataset",
    "workloads.generate": "generate",
    "workloads.traces": "read_trace read_trace_report",
}
"""The public names of every module. A test checks that type checkers see the same names above."""
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

_MODULES = {"library": "analysis.library", "plot": "show.plot"}
"""Modules that are public by a name of their own."""

__all__ = [*sorted(_HOMES), *_MODULES]


def __getattr__(name: str) -> Any:
    """Load a public name or module on first use."""
    if name in _HOMES:
        value = getattr(import_module(f"optsched.{_HOMES[name]}"), name)
    else:
        try:
            value = import_module(f"optsched.{_MODULES.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != f"optsched.{name}":
                raise

            raise AttributeError(f"module 'optsched' has no attribute {name!r}") from None

    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
