"""Schedulers of the literature, one file per family, found by a registry.

A file of this package defines policies with `policy`; nothing else needs editing::

    @policy("shortest-prompt", "waiting requests in ascending prompt tokens")
    def shortest_prompt(*, max_running: int | None = None) -> Rules:
        return Rules(order="prompt", max_running=max_running)
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from optsched.errors import InputError
from optsched.instance import Instance
from optsched.policies.base import Batch, Policy, Rules, View

__all__ = [
    "Batch", "Policy", "PolicyInfo", "Rules", "View", "allows", "make_policy", "parse_spec",
    "policies", "policy",
]  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A parameter of a policy: its type, default value and the text of both."""

    type: type
    optional: bool
    default: Any


@dataclass(frozen=True)
class PolicyInfo:
    """A registered policy.

    Parameters
    ----------
    name, summary : str
    make : callable
        Builds the `Rules` or the policy object from keyword parameters.
    clairvoyant : bool
        Whether it uses output lengths: the true ones, unless the instance carries predictions.
    paper : str
        Where it is from.
    """

    name: str
    summary: str
    make: Callable[..., Rules | Policy]
    clairvoyant: bool = False
    paper: str = ""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by name, read from the signature of ``make``."""
        # A class is annotated in its constructor; what has no annotation is a text.
        maker = self.make.__init__ if isinstance(self.make, type) else self.make  # type: ignore[misc]
        hints = typing.get_type_hints(maker)
        found = {}
        for name, parameter in inspect.signature(self.make).parameters.items():
            hint = hints.get(name, str)
            kinds = typing.get_args(hint) or (hint,)
            plain = [kind for kind in kinds if kind is not types.NoneType]
            found[name] = Parameter(plain[0], len(plain) < len(kinds), parameter.default)
        return found


_REGISTRY: dict[str, PolicyInfo] = {}


def policy(
    name: str, summary: str, *, clairvoyant: bool = False, paper: str = ""
) -> Callable[[Callable[..., Rules | Policy]], Callable[..., Rules | Policy]]:
    """Register the decorated function as the maker of policy ``name`` (see the module's text)."""

    def register(make: Callable[..., Rules | Policy]) -> Callable[..., Rules | Policy]:
        _REGISTRY[name] = PolicyInfo(name, summary, make, clairvoyant, paper)
        return make

    return register


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def policies() -> dict[str, PolicyInfo]:
    """Return every registered policy by name, sorted."""
    _discover()
    return dict(sorted(_REGISTRY.items()))


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,...`` into the name and the texts of its parameters.

    Raises
    ------
    InputError
        A parameter without ``=``, or one given twice.
    """
    if ".py:" in spec:
        file, _, rest = spec.partition(".py:")
        name, _, tail = rest.partition(":")
        name = f"{file}.py:{name}"
    else:
        name, _, tail = spec.partition(":")
    texts: dict[str, str] = {}
    for part in filter(None, tail.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"policy {spec!r}: {part!r} is no parameter; key=value is right")
        if key in texts:
            raise InputError(f"policy {spec!r}: parameter {key!r} is given twice")
        texts[key] = value
    return name, texts


def make_policy(spec: str) -> tuple[Rules | Policy, PolicyInfo]:
    """Return the policy of a specification: ``name:key=value,...`` or ``file.py:Class:...``.

    Raises
    ------
    InputError
        An unknown policy or parameter, or a value of the wrong type.
    """
    name, texts = parse_spec(spec)
    info = _from_file(name) if ".py:" in name else policies().get(name)
    if info is None:
        raise InputError(f"policy {name!r} is unknown; known are {', '.join(policies())}")
    known = info.parameters
    values = {}
    for key, text in texts.items():
        if key not in known:
            words = ", ".join(known) or "none"
            raise InputError(f"policy {name!r}: parameter {key!r} is unknown; known are {words}")
        values[key] = _convert(text, known[key], f"policy {name!r}: parameter {key}")
    missing = [
        k for k, p in known.items() if p.default is inspect.Parameter.empty and k not in values
    ]
    if missing:
        raise InputError(f"policy {name!r}: parameter {missing[0]!r} is needed")
    try:
        return info.make(**values), info
    except InputError as error:
        raise InputError(f"policy {spec!r}: {error}") from None


def _convert(text: str, parameter: Parameter, where: str) -> Any:
    if parameter.optional and text.lower() in ("none", "null", "inf"):
        return None
    if parameter.type is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{where}: {text!r}; true or false is right")
        return text.lower() == "true"
    if parameter.type in (int, float):
        try:
            value = parameter.type(text)
        except ValueError:
            value = float("nan")
        if value != value or value in (float("inf"), float("-inf")):
            kind = "an integer" if parameter.type is int else "a number"
            raise InputError(f"{where}: {text!r} is not {kind}")
        return value
    return text


def _from_file(name: str) -> PolicyInfo:
    """Load a user's policy: a class with ``batch(view)``, or a function that returns Rules."""
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise InputError(f"policy {name!r}: {file}: no such file; file.py:Class is right")
    spec = importlib.util.spec_from_file_location(f"optsched_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"policy {name!r}: {file} fails to load: {error!r}") from error
    make = getattr(module, attribute, None)
    if not callable(make):
        raise InputError(f"policy {name!r}: {file} defines no class or function {attribute!r}")
    clairvoyant = bool(getattr(make, "clairvoyant", True))
    summary = (inspect.getdoc(make) or "a user's policy").partition("\n")[0]
    return PolicyInfo(name, summary, make, clairvoyant, "")


def allows(spec: str, instance: Instance) -> str | None:
    """Return why an instance rules a policy out, or None if it can run there."""
    made, _ = make_policy(spec)
    if not isinstance(made, Rules):
        return None
    chunked = made.chunked and instance.chunked_prefill is not False
    for name in ("max_batch_tokens", "max_prefill_tokens"):
        limit = getattr(instance.limits, name)
        if limit is not None and not chunked and (instance.prompt_tokens > limit).any():
            i = int((instance.prompt_tokens > limit).argmax())
            return (
                f"request {i}: prompt_tokens {instance.prompt_tokens[i]} exceeds {name} {limit}, "
                "and the policy splits no prefill"
            )
    return None
