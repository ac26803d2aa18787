"""optsched: how good could an LLM-serving schedule have been, with a proof.

    >>> import optsched
    >>> instance = optsched.Instance([0, 0], [1, 2], [3, 1], kv_capacity=6)
    >>> evaluation = optsched.evaluate(instance, optsched.simulate(instance, "mc-sf"))
    >>> evaluation.metrics["tel"]
    4

Solvers, numba, pandas and matplotlib are imported on first use, so that importing the package
is cheap. The functions are bound eagerly because some share their module's name.
"""

from optsched.cost import BatchCost, UnitCost, load_cost_model, shipped_models
from optsched.errors import OptschedError
from optsched.evaluate import Evaluation, evaluate
from optsched.instance import Instance, Limits
from optsched.schedule import Schedule, from_batches, from_starts
from optsched.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "BatchCost",
    "Evaluation",
    "Instance",
    "Limits",
    "OptschedError",
    "Schedule",
    "UnitCost",
    "__version__",
    "evaluate",
    "from_batches",
    "from_starts",
    "load_cost_model",
    "shipped_models",
    "simulate",
]
