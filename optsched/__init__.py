"""optsched: how good could an LLM-serving schedule have been, with a proof.

    >>> import optsched
    >>> instance = optsched.Instance([0, 0], [1, 2], [3, 1], kv_capacity=6)
    >>> evaluation = optsched.evaluate(instance, optsched.simulate(instance, "mc-sf"))
    >>> evaluation.metrics["tel"]
    4

Public names are loaded on first use, so that importing the package is cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Instance": "instance",
    "Limits": "instance",
    "BatchCost": "cost",
    "UnitCost": "cost",
    "load_cost_model": "cost",
    "shipped_models": "cost",
    "Schedule": "schedule",
    "from_starts": "schedule",
    "from_batches": "schedule",
    "Evaluation": "evaluate",
    "evaluate": "evaluate",
    "simulate": "simulate",
    "solve": "solve",
    "Result": "solve",
    "compare": "compare",
    "Comparison": "compare",
    "read_instance": "io",
    "write_instance": "io",
    "read_schedule": "io",
    "write_schedule": "io",
    "generate": "generate",
    "read_trace": "traces",
    "OptschedError": "errors",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'optsched' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
