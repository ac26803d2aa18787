"""Schedulers of the literature, one file per family, found by a registry.

A file of this package defines policies with `policy`; nothing else needs editing::

    @policy("shortest-prompt", "waiting requests in ascending prompt tokens")
    def shortest_prompt(*, max_running: int | None = None) -> Rules:
        return Rules(order="prompt", max_running=max_running)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from optsched.policies.base import Batch, Policy, Rules, Runner, Scheduler, View, Windows
from optsched.policies.helpers import (
    admit,
    decode_all,
    evict_until_fits,
    fits,
    fits_to_the_end,
    kv_after,
)
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.registry import Registry
from optsched.problem.specs import (
    Parameter,
    convert_all,
    is_file,
    load_attribute,
    parameters_of,
    parse_spec,
)
from optsched.workloads.predict import check_predictor

__all__ = [
    "Batch", "Parameter", "Policy", "PolicyInfo", "Rules", "Runner", "Scheduler", "View", "Windows",
    "admit", "allows", "decode_all", "evict_until_fits", "fits", "fits_to_the_end",
    "is_clairvoyant", "kv_after", "lengths_note", "make_policy", "parse_spec", "policies", "policy",
    "runner_of",
]  # fmt: skip


Make = TypeVar("Make", bound=Callable[..., Scheduler])


@dataclass(frozen=True)
class PolicyInfo:
    """A registered policy.

    Parameters
    ----------
    name, summary : str
    make : callable
        Builds the `Runner` or the object with ``batch(view)`` from keyword parameters.
    clairvoyant : bool
        Whether it uses output lengths: the true ones, unless the instance carries predictions.
    paper : str
        Where it is from.
    predictor : str or None
        What its specification says of a predictor (`optsched.workloads.predict.predict`).
    assumed : bool
        Whether ``clairvoyant`` is a guess: a user's object that does not say.
    """

    name: str
    summary: str
    make: Callable[..., Scheduler]
    clairvoyant: bool = False
    paper: str = ""
    predictor: str | None = None
    assumed: bool = False

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by name, read from the signature of ``make``."""
        return parameters_of(self.make)


_REGISTRY: Registry[PolicyInfo] = Registry("policy", __name__)


def policy(
    name: str, summary: str, *, clairvoyant: bool = False, paper: str = ""
) -> Callable[[Make], Make]:
    """Register the decorated function as the maker of policy ``name`` (see the module's text)."""

    def register(make: Make) -> Make:
        _REGISTRY.add(name, PolicyInfo(name, summary, make, clairvoyant, paper))
        return make

    return register


def policies() -> dict[str, PolicyInfo]:
    """Return every registered policy by name, sorted."""
    return _REGISTRY.all()


def make_policy(spec: str) -> tuple[Scheduler, PolicyInfo]:
    """Return the policy of a specification: ``name:key=value,...`` or ``file.py:NAME:...``.

    ``NAME`` is a class with ``batch(view)``, a function that returns such an object or a `Runner`
    (`Rules`, `Windows`, or one with a loop of its own), or a `Runner` itself. An attribute
    ``clairvoyant`` of the object says whether it uses output lengths (`Policy`).

    Any policy takes ``predictor=NAME``, and the predictor's own parameters as
    ``predictor.KEY=VALUE``: ``mc-sf:predictor=noisy,predictor.mae=20``.

    Raises
    ------
    InputError
        An unknown policy, predictor or parameter, a value of the wrong type, or a user's file
        that makes no policy.
    """
    name, texts = parse_spec(spec)
    info = _from_file(name) if is_file(name) else _REGISTRY.get(name)
    predictor = _predictor(spec, texts)
    own = {k: v for k, v in texts.items() if k.partition(".")[0] != "predictor"}
    values = convert_all(own, info.parameters, f"policy {name!r}")
    try:
        made = info.make(**values)
    except InputError as error:
        raise InputError(f"policy {spec!r}: {error}") from None
    except (Exception, SystemExit) as error:
        if not is_file(name):
            raise
        raise InputError(f"policy {spec!r}: cannot be made: {error!r}") from error
    if is_file(name):
        info = _declared(spec, made, info)
    if predictor is not None:
        told = predictor.partition(":")[0] == "oracle"
        info = replace(info, predictor=predictor, clairvoyant=info.clairvoyant and told)
    return made, info


def runner_of(made: Scheduler) -> Runner:
    """Return a scheduler as something that runs: itself, or what asks its object batch by batch."""
    if isinstance(made, Runner):
        return made
    from optsched.policies.engine.online import Online

    return Online(made)


def is_clairvoyant(made: Scheduler, info: PolicyInfo, instance: Instance) -> bool:
    """Return whether a policy's decisions use true output lengths on an instance.

    Rules say so themselves, in the form that applies to the instance's time unit; for a policy
    object the registry does. Nothing is clairvoyant where predictions are given.
    """
    if instance.has_predictions:
        return False
    if info.predictor is not None and info.predictor.partition(":")[0] != "oracle":
        return False
    says = runner_of(made).uses_lengths(instance)
    return info.clairvoyant if says is None else says


def lengths_note(made: Scheduler, info: PolicyInfo, instance: Instance) -> str | None:
    """Return in words what `is_clairvoyant` says, and how sure it is; None if it says no."""
    if not is_clairvoyant(made, info, instance):
        return None
    if info.assumed and runner_of(made).uses_lengths(instance) is None:
        return (
            "may use the true output lengths (an attribute `clairvoyant = False` says that it "
            "does not)"
        )
    return "is clairvoyant: it uses the true output lengths"


def _predictor(spec: str, texts: dict[str, str]) -> str | None:
    """Return the specification of the predictor that a policy's names, or None."""
    inner = [
        f"{key.removeprefix('predictor.')}={text}"
        for key, text in texts.items()
        if key.startswith("predictor.")
    ]
    if "predictor" not in texts:
        if inner:
            raise InputError(f"policy {spec!r}: predictor.{inner[0]} without predictor=NAME")
        return None
    predictor = ":".join(filter(None, [texts["predictor"], ",".join(inner)]))
    try:
        check_predictor(predictor)
    except InputError as error:
        raise InputError(f"policy {spec!r}: {error}") from None
    return predictor


def _from_file(name: str) -> PolicyInfo:
    """Load a user's policy: a class with ``batch(view)``, a function, or a scheduler as data."""
    found = load_attribute(name, "policy", (Rules, Windows, Runner))
    if isinstance(found, Runner):
        guess = not isinstance(found, (Rules, Windows))  # these say where they use lengths
        return PolicyInfo(name, "a user's rules", lambda: found, clairvoyant=guess, assumed=guess)
    summary = (inspect.getdoc(found) or "a user's policy").partition("\n")[0]
    return PolicyInfo(name, summary, found, clairvoyant=True, assumed=True)


def _declared(spec: str, made: Scheduler, info: PolicyInfo) -> PolicyInfo:
    """Check what a user's file made; return the information with what it says of itself."""
    if not isinstance(made, Runner) and not callable(getattr(made, "batch", None)):
        raise InputError(
            f"policy {spec!r}: makes {made!r:.80}; Rules, Windows, or an object with batch(view), "
            "is right"
        )
    says = getattr(made, "clairvoyant", None)
    if says is None:
        return info
    return replace(info, clairvoyant=bool(says), assumed=False)


def allows(spec: str, instance: Instance) -> str | None:
    """Return why an instance rules a policy out, or None if it can run there."""
    return runner_of(make_policy(spec)[0]).allows(instance)
