"""optsched: how good could an LLM-serving schedule have been, with a proof.

    >>> import optsched
    >>> instance = optsched.Instance([0, 0], [1, 2], [3, 1], kv_capacity=6)
    >>> evaluation = optsched.evaluate(instance, optsched.simulate(instance, "mc-sf"))
    >>> evaluation.metrics["tel"]
    4

Everything is loaded on first use, so that importing the package is fast.
"""

import re
from importlib import import_module
from pathlib import Path

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
# The public names and where they are, as type checkers read them in the stub beside this file.
_HOMES = {
    name: home
    for home, names in re.findall(r"^from (\S+) import (\([^)]*\)|.+)$", _STUB, re.MULTILINE)
    for name in re.findall(r"as (\w+)", names)
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Load a public name or module on first use."""
    home = _HOMES.get(name, __name__)
    value = vars(import_module(home)).get(name)
    if value is None:
        try:
            value = import_module(f"{home}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{home}.{name}":
                raise

            raise AttributeError(f"module 'optsched' has no attribute {name!r}") from None

    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
