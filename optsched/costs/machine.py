"""Machines: what each worker of a fleet can hold and do, and how long its batches take."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from optsched.costs.cost import BatchCost, CostModel, UnitCost, cost_for, load_cost_model
from optsched.problem.columns import INT64_MAX, check_choice, whole_number
from optsched.problem.errors import InputError, UsageError, check_kind
from optsched.problem.instance import Instance, Limits

Role = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True, eq=False)
class Machine:
    """A worker of a fleet.

    Parameters
    ----------
    kv_capacity : int
        Maximum number of KV tokens that it holds at any time.
    cost_model : BatchCost, str or path, optional
        Its batch times, or the name or file of them. None: every batch takes one round.
    limits : Limits
        Hard limits of each of its batches.
    role : {"mixed", "prefill", "decode"}
        What it is for. A prefill machine makes no output token but the first of a request, and a
        decode machine prefills only what it has lost. They stand in `Pools`.
    """

    kv_capacity: int
    cost_model: CostModel | str | Path | None = None
    limits: Limits = field(default_factory=Limits)
    role: Role = "mixed"

    def __post_init__(self) -> None:
        check_choice(self.role, "machine: role", get_args(Role))
        if not isinstance(self.limits, Limits):
            raise InputError(f"machine: limits: found {self.limits!r}; expected an optsched.Limits")

        capacity = whole_number(self.kv_capacity, "machine: kv_capacity", 1, INT64_MAX)
        object.__setattr__(self, "kv_capacity", capacity)

    @property
    def cost(self) -> CostModel:
        """The cost model, loaded."""
        given = self.cost_model
        if isinstance(given, (str, Path)):
            given = load_cost_model(given)
            object.__setattr__(self, "cost_model", given)

        return UnitCost() if given is None else given


@dataclass(frozen=True)
class Link:
    """What it takes to move a request's KV from one machine to another.

    Parameters
    ----------
    latency_s : float
        Seconds that every move takes. In an instance in rounds these are whole rounds.
    seconds_per_token : float
        Seconds that each token's KV takes in addition.
    recompute_last : bool
        Whether the receiver computes the last prompt token again, which gives the first output
        token. Otherwise the prefill machine makes the first output token.
    """

    latency_s: float = 0.0
    seconds_per_token: float = 0.0
    recompute_last: bool = False

    def __post_init__(self) -> None:
        for name in ("latency_s", "seconds_per_token"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"link: {name}: found {value!r}; expected a number >= 0")

    def moved(self, prompt_tokens: int) -> int:
        """Return how many tokens' KV moves when the prefill of a prompt is over.

        Parameters
        ----------
        prompt_tokens : int
        """
        return prompt_tokens - int(self.recompute_last and prompt_tokens > 1)

    def time(self, tokens: int) -> float:
        """Return how long the KV of so many tokens moves.

        Parameters
        ----------
        tokens : int
        """
        return self.latency_s + tokens * self.seconds_per_token


@dataclass(frozen=True, eq=False)
class Pools:
    """Machines with roles, between which the KV of requests moves.

    Parameters
    ----------
    machines : sequence of Machine
        The machine of each worker.
    link : Link
        What each move takes.
    deflect_below : int
        Decode machines may prefill requests with fewer prompt tokens than this; 0: none.
    """

    machines: Sequence[Machine]
    link: Link = Link()
    deflect_below: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "machines", tuple(self.machines))
        whole_number(self.deflect_below, "pools: deflect_below", 0, INT64_MAX)
        roles = {one.role for one in self.machines if isinstance(one, Machine)}
        for lacking in ({"prefill"}, {"decode"}):
            if roles == lacking:
                raise UsageError(
                    f"pools: found only {lacking.pop()} machines; expected both kinds, or mixed"
                )

    def workers(self, *roles: Role) -> list[int]:
        """Return the workers whose machines have one of some roles.

        Parameters
        ----------
        *roles : {"mixed", "prefill", "decode"}
        """
        return [w for w, one in enumerate(self.machines) if one.role in roles]

    @property
    def minorants(self) -> list["Pools"]:
        """These pools under each choice of minorants of the machines' cost models."""
        costs = {m.cost.sha256: m.cost for m in self.machines if isinstance(m.cost, BatchCost)}
        found = []
        for way in product(*(cost.minorants for cost in costs.values())):
            chosen: dict[object, BatchCost] = dict(zip(costs, way, strict=True))
            machines = [replace(m, cost_model=chosen[m.cost.sha256]) for m in self.machines]
            found.append(replace(self, machines=machines))

        return found

    @property
    def words(self) -> str:
        """How many machines there are of each role, such as ``"2 prefill, 6 decode"``."""
        counts = {role: len(self.workers(role)) for role in ("prefill", "decode", "mixed")}
        return ", ".join(f"{count} {role}" for role, count in counts.items() if count)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that result files carry."""
        roles = [one.role for one in self.machines]
        data = {"roles": roles, "link": asdict(self.link), "deflect_below": self.deflect_below}
        own = [{"kv_capacity": m.kv_capacity, "cost_model": m.cost.name} for m in self.machines]
        return data if all(one == own[0] for one in own) else {**data, "machines": own}


def check_pools(given: object) -> None:
    """Raise `InputError` unless pools of machines, or None, are given."""
    words = "an optsched.Pools (optsched.costs.pools.make_pools makes one of '2p6d'), or None"
    check_kind("pools", given, (Pools, NoneType), words)


Hardware = CostModel | str | Path | Machine | Sequence[Machine] | Pools | None
"""A cost model, or the name or file of one; or the machine of each worker; or pools of them."""


def are_machines(given: Hardware) -> bool:
    """Whether machines are given, and not a cost model, which all workers have."""
    return isinstance(given, (Machine, Pools)) or (
        isinstance(given, Iterable) and not isinstance(given, (str, Path, BatchCost))
    )


def machines_of(instance: Instance, given: Hardware) -> tuple[Machine, ...]:
    """Return the machine of each worker, or the instance's one, which all workers have."""
    if not are_machines(given):
        cost = cost_for(instance, given)  # type: ignore[arg-type]
        return (Machine(instance.kv_capacity, cost, instance.limits),)

    pools = isinstance(given, Pools)
    if isinstance(given, Pools) and instance.in_rounds:
        for name in ("latency_s", "seconds_per_token"):
            if not float(getattr(given.link, name)).is_integer():
                found = getattr(given.link, name)
                raise UsageError(f"link: {name}: found {found!r}; expected whole rounds")

    plain = given.machines if isinstance(given, Pools) else given
    machines: tuple[Machine, ...] = (
        (plain,) if isinstance(plain, Machine) else tuple(plain)  # type: ignore[arg-type]
    )
    if not machines:
        raise UsageError("machines: found none; expected one or more")

    for w, machine in enumerate(machines):
        if not isinstance(machine, Machine):
            found = type(machine).__name__
            raise UsageError(f"machines: machine {w}: found {found}; expected an optsched.Machine")
        if machine.role != "mixed" and not pools:
            raise UsageError(
                f"machines: machine {w}: found role {machine.role!r}; expected 'mixed', or "
                "optsched.Pools of the machines"
            )
        if isinstance(machine.cost, UnitCost) != instance.in_rounds:
            expected = "none, in rounds" if instance.in_rounds else "one, in seconds"
            found = "none" if machine.cost_model is None else f"{machine.cost.name!r}"
            raise UsageError(
                f"machines: machine {w}: cost_model: found {found}; expected {expected}"
            )

    return machines


def digest_of(machines: Sequence[Machine]) -> str | None:
    """Return the digest of the cost models of machines."""
    digests = [one.cost.sha256 for one in machines if isinstance(one.cost, BatchCost)]
    if len(set(digests)) < 2:
        return digests[0] if digests else None

    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
