"""Schedulers of the literature, one file per family, found by a registry.

A file of this package defines policies with `policy`; nothing else needs editing::

    @policy("shortest-prompt", "waiting requests in ascending prompt tokens")
    def shortest_prompt(*, max_running: int | None = None) -> Rules:
        return Rules(order="prompt", max_running=max_running)
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from optsched.costs.fleet import MAX_MACHINES
from optsched.policies.base import Batch, Policy, Rules, Runner, Scheduler, View, Windows
from optsched.policies.helpers import (
    admit,
    decode_all,
    evict_until_fits,
    fits,
    fits_to_the_end,
    kv_after,
)
from optsched.problem import specs
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError, kind_of, raised
from optsched.problem.instance import Instance
from optsched.problem.registry import Registry
from optsched.problem.specs import Parameter, convert_all, is_file, parse_spec
from optsched.workloads.predict import check_predictor

_ALIASES = {"vllm-v0": "vllm"}
_ROUTING = {"router", "decode_router", "reserve"}
_FACTORY = "; a function returns the policy, an object with batch(view), and is not one itself"
_ROUTERS = ("least-work", "least-requests", "least-tokens", "round-robin")

Make = TypeVar("Make", bound=Callable[..., Scheduler])
Named = str | Scheduler | Iterable[str | Scheduler] | Mapping[str, str | Scheduler]
"""Policies: specifications or objects, which may have labels."""


@dataclass(frozen=True)
class PolicyInfo:
    """A registered policy.

    Parameters
    ----------
    name, summary : str
        The name in specifications, and one line about the policy.
    make : callable
        It builds the `Runner`, or the object with ``batch(view)``, from keyword parameters.
    clairvoyant : bool
        Whether it uses output lengths. These are the true ones unless the instance carries
        predictions.
    paper : str
        The paper and the place in it that the policy is from; empty for our own.
    predictor : str or None
        The predictor that its specification names, as for `optsched.workloads.predict.predict`.
    workers : int or None
        The number of workers that its specification names, if the problem has one machine.
    assumed : bool
        Whether ``clairvoyant`` is assumed, because a user's object does not say.
    """

    name: str
    summary: str
    make: Callable[..., Scheduler]
    clairvoyant: bool = False
    paper: str = ""
    predictor: str | None = None
    workers: int | None = None
    assumed: bool = False

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by name, read from the signature of ``make``."""
        return specs.parameters_of(self.make)


_REGISTRY: Registry[PolicyInfo] = Registry("policy", __name__, plugins="optsched.policies")


def policy(
    name: str, summary: str, *, clairvoyant: bool = False, paper: str = ""
) -> Callable[[Make], Make]:
    """Register the decorated function as the maker of a policy (see the module's text).

    Parameters
    ----------
    name, summary : str
        The name in specifications, and one line about the policy.
    clairvoyant : bool
        Whether it uses output lengths, see `PolicyInfo`.
    paper : str
        The paper and the place in it that the policy is from.

    Returns
    -------
    callable
        A decorator that returns the function unchanged.
    """

    def register(make: Make) -> Make:
        _REGISTRY.add(name, PolicyInfo(name, summary, make, clairvoyant, paper))
        return make

    return register


def list_policies() -> dict[str, PolicyInfo]:
    """Return every registered policy by name, sorted by name."""
    return _REGISTRY.all()


def label_of(policy: str | Scheduler) -> str:
    """Return what tables call a policy: its specification, or its ``name``, or its class's."""
    if isinstance(policy, str):
        return policy

    kind = policy if isinstance(policy, type) else type(policy)
    return str(getattr(policy, "name", kind.__name__))


def labelled(policies: Named) -> dict[str, str | Scheduler]:
    """Return policies by label, each once."""
    if isinstance(policies, Mapping):
        return dict(policies)

    # A callable is a class of policies. One policy alone is a list of one.
    single = isinstance(policies, (str, Runner)) or hasattr(policies, "batch") or callable(policies)
    all_policies: Any = [policies] if single else policies
    by_label: dict[str, str | Scheduler] = {}
    for one_policy in all_policies:
        label = label_of(one_policy)
        if label in by_label:
            raise InputError(
                f"policies: found {label} twice; expected each once, or a mapping of labels"
            )

        by_label[label] = one_policy

    return by_label


def make_policy(spec: str | Scheduler) -> tuple[Scheduler, PolicyInfo]:
    """Make the policy that a specification describes, or a copy of a policy that is made.

    Every run makes its policy, so that none begins with what another one has left in an object. An
    object with something that cannot be copied says by ``__deepcopy__`` what a copy is.

    A specification is ``name:key=value,...`` or ``file.py:NAME:key=value,...``. ``NAME`` is a
    class with ``batch(view)``, a `Runner` (`Rules`, `Windows`, or one with a loop of its own), or
    a function that returns an object of either kind. An attribute ``clairvoyant`` of the object
    says whether it uses output lengths (`Policy`).

    Any policy takes ``predictor=NAME``, and the predictor's own parameters as
    ``predictor.KEY=VALUE``: ``mc-sf:predictor=noisy,predictor.mae=20``. With ``router=NAME`` that
    is who chooses the worker of a request (`optsched.policies.routers`). How many workers there are
    is the problem's to say; texts of files may have ``workers=N``, for N machines like its one.

    Parameters
    ----------
    spec : str, Runner or Policy

    Returns
    -------
    made : Runner or Policy
    info : PolicyInfo
        What is known of it, with the predictor of the specification.
    """
    if not isinstance(spec, str):
        made, label = _object_of(spec), label_of(spec)
        return _declared(label, made, _info_of(label, made))

    name, texts = parse_spec(spec)
    info = _from_file(name) if is_file(name) else _REGISTRY.get(_ALIASES.get(name, name))
    predictor = _predictor(spec, texts)
    if predictor is not None:
        try:
            check_predictor(predictor)
        except InputError as error:
            raise InputError(f"policy {spec!r}: {error}") from None

    # The texts are of four kinds: the predictor's, workers, the router's, and the policy's own.
    settings = {k: v for k, v in texts.items() if k.partition(".")[0] != "predictor"}
    workers = None if "workers" in info.parameters else settings.pop("workers", None)
    for_router = settings.keys() & _ROUTING - info.parameters.keys()
    routing = {key: settings.pop(key) for key in for_router}
    hint = _FACTORY if is_file(name) and inspect.isfunction(info.make) else ""
    values = convert_all(settings, info.parameters, f"policy {name!r}", hint=hint)

    try:
        made = info.make(**values)
    except InputError as error:
        raise InputError(f"policy {spec!r}: {error}") from None
    except (Exception, SystemExit) as error:
        if not is_file(name):  # a mistake of this package, not of a user's file
            raise

        raise InputError(f"policy {spec!r}: cannot be made: {raised(error)}") from error

    if is_file(name):
        made, info = _declared(spec, made, info)
    if routing:
        made = _routed(spec, made, routing)
    if workers is not None:
        where, known = f"policy {spec!r}", {"workers": Parameter(int, False, None)}
        count = convert_all({"workers": workers}, known, where)["workers"]
        info = replace(info, workers=check_whole(count, f"{where}: workers", 1, MAX_MACHINES))
    # With a predictor, only the one that tells the true lengths makes a policy clairvoyant.
    if predictor is not None:
        oracle = predictor.partition(":")[0] == "oracle"
        info = replace(info, predictor=predictor, clairvoyant=info.clairvoyant and oracle)

    return made, info


def _is_scheduler(made: Any) -> bool:
    """Whether an object, which is no class, is a `Runner` or answers ``batch(view)``."""
    answers = isinstance(made, Runner) or callable(getattr(made, "batch", None))
    return answers and not isinstance(made, type)


def _object_of(given: Any) -> Scheduler:
    """Return a scheduler that is an object, or an object of a scheduler that is a class."""
    made = given
    if isinstance(given, type) and (issubclass(given, Runner) or hasattr(given, "batch")):
        try:
            made = given()
        except Exception as error:
            raise InputError(
                f"policy: found the class {given.__name__}, which fails to make an object: "
                f"{raised(error)}; expected an object"
            ) from error

    if not _is_scheduler(made):
        raise InputError(
            f"policy: found {kind_of(given)}; expected a specification such as 'mc-sf', an object "
            "with batch(view), or a Runner such as optsched.Rules"
        )

    return made


def _routed(spec: str, made: Scheduler, texts: dict[str, str]) -> Scheduler:
    """Return a policy behind the router that its specification asks for."""
    from optsched.policies.routers import Routed

    where, known = f"policy {spec!r}", specs.parameters_of(Routed)
    values = convert_all(texts, {name: known[name] for name in _ROUTING}, where)
    try:
        return Routed(runner_of(made), **values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def behind(spec: str, router: str) -> str:
    """Return a policy's specification behind a router, unless it names one."""
    texts = parse_spec(spec)[1]
    if "router" in texts:
        return spec

    return f"{spec}{',' if texts else ':'}router={router}"


def behind_routers(specs: Sequence[str], workers: int) -> list[str]:
    """Return policies on several workers behind each usual router, which know all lengths."""
    if workers == 1:
        return list(specs)

    pairs = ((router, spec) for router in _ROUTERS for spec in specs)
    return [f"{behind(spec, router)},predictor=oracle" for router, spec in pairs]


def runner_of(made: Scheduler) -> Runner:
    """Return a scheduler as a `Runner`."""
    if isinstance(made, Runner):
        return made

    from optsched.policies.engine.online import Online

    return Online(made)


def is_clairvoyant(made: Scheduler, info: PolicyInfo, instance: Instance) -> bool:
    """Return whether a policy's decisions use true output lengths on an instance.

    A `Runner` such as `Rules` may say so itself, for the instance's time unit. For all others the
    registry says it. No policy is clairvoyant on an instance that carries predictions.

    Parameters
    ----------
    made : Runner or Policy
    info : PolicyInfo
        What `make_policy` returned with it.
    instance : Instance
    """
    if instance.has_predictions:
        return False
    if info.predictor is not None and info.predictor.partition(":")[0] != "oracle":
        return False

    declared = runner_of(made).uses_lengths(instance)
    return info.clairvoyant if declared is None else declared


def lengths_note(made: Scheduler, info: PolicyInfo, instance: Instance) -> str | None:
    """Return in words that a policy uses true output lengths, and how sure this is."""
    if not is_clairvoyant(made, info, instance):
        return None
    if info.assumed and runner_of(made).uses_lengths(instance) is None:
        return (
            "may use the true output lengths (an attribute `clairvoyant = False` says that it "
            "does not)"
        )

    return "is clairvoyant: it uses the true output lengths"


def predictor_of(spec: str) -> str | None:
    """Return the predictor that a policy's specification names, unchecked, or None.

    Parameters
    ----------
    spec : str
        The policy's specification (`make_policy`).
    """
    return _predictor(spec, parse_spec(spec)[1])


def _predictor(spec: str, texts: dict[str, str]) -> str | None:
    """Return the specification of the predictor in a policy's parsed one, or None."""
    own_parameters = [
        f"{key.removeprefix('predictor.')}={text}"
        for key, text in texts.items()
        if key.startswith("predictor.")
    ]
    if "predictor" not in texts:
        if own_parameters:
            raise InputError(
                f"policy {spec!r}: found predictor.{own_parameters[0]} alone; "
                "expected predictor=NAME with it"
            )

        return None

    return ":".join(filter(None, [texts["predictor"], ",".join(own_parameters)]))


def _from_file(name: str) -> PolicyInfo:
    """Load a user's policy, which is a class with ``batch(view)``, a function or a `Runner`."""
    return _info_of(name, specs.load_attribute(name, "policy", (Rules, Windows, Runner)))


def _info_of(name: str, definition: Any) -> PolicyInfo:
    """Return what is known of a user's object, or of what makes one."""
    if isinstance(definition, Runner):
        # These say themselves where they use lengths (`Runner.uses_lengths`).
        guess = not isinstance(definition, (Rules, Windows))
        return PolicyInfo(
            name, "a user's rules", lambda: definition, clairvoyant=guess, assumed=guess
        )

    summary = (inspect.getdoc(definition) or "a user's policy").partition("\n")[0]
    return PolicyInfo(name, summary, definition, clairvoyant=True, assumed=True)


def _declared(spec: str, made: Scheduler, info: PolicyInfo) -> tuple[Scheduler, PolicyInfo]:
    """Check a user's object; return a copy, and the information with what the object declares."""
    if not _is_scheduler(made):
        raise InputError(
            f"policy {spec!r}: found {made!r:.80}; expected Rules, Windows, or an object with "
            "batch(view)"
        )

    try:
        made = deepcopy(made)
    except Exception as error:
        raise InputError(
            f"policy {spec!r}: every run has a copy of its own, and it cannot be copied: "
            f"{raised(error)}; expected one that copy.deepcopy takes, such as by __deepcopy__"
        ) from error

    declared = getattr(made, "clairvoyant", None)
    return made, info if declared is None else replace(
        info, clairvoyant=bool(declared), assumed=False
    )


def allows(spec: str, instance: Instance) -> str | None:
    """Return why a policy cannot run on an instance, or None if it can.

    Parameters
    ----------
    spec : str
        The policy's specification (`make_policy`).
    instance : Instance
    """
    return runner_of(make_policy(spec)[0]).allows(instance)
