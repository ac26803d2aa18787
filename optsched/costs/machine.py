"""Machines: what each worker of a fleet can hold and do, and how long its batches take."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from optsched.costs.cost import BatchCost, CostModel, UnitCost, cost_for, load_cost_model
from optsched.problem.columns import INT64_MAX, whole_number
from optsched.problem.errors import InputError, UsageError
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
        What it is for. Only ``"mixed"`` can be scheduled so far.
    """

    kv_capacity: int
    cost_model: CostModel | str | Path | None = None
    limits: Limits = field(default_factory=Limits)
    role: Role = "mixed"

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            roles = ", ".join(get_args(Role))
            raise InputError(f"machine: role: found {self.role!r}; expected one of {roles}")

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


Hardware = CostModel | str | Path | Machine | Sequence[Machine] | None
"""A cost model, or the name or file of one; or the machine of each worker."""


def are_machines(given: Hardware) -> bool:
    """Whether machines are given, and not a cost model, which all workers have."""
    return isinstance(given, Machine) or (
        isinstance(given, Iterable) and not isinstance(given, (str, Path, BatchCost))
    )


def machines_of(instance: Instance, given: Hardware) -> tuple[Machine, ...]:
    """Return the machine of each worker, or the instance's one, which all workers have."""
    if not are_machines(given):
        cost = cost_for(instance, given)  # type: ignore[arg-type]
        return (Machine(instance.kv_capacity, cost, instance.limits),)

    machines: tuple[Machine, ...] = (
        (given,) if isinstance(given, Machine) else tuple(given)  # type: ignore[arg-type]
    )
    if not machines:
        raise UsageError("machines: found none; expected one or more")

    for w, machine in enumerate(machines):
        if not isinstance(machine, Machine):
            found = type(machine).__name__
            raise UsageError(f"machines: machine {w}: found {found}; expected an optsched.Machine")
        if machine.role != "mixed":
            raise UsageError(
                f"machines: machine {w}: found role {machine.role!r}; expected 'mixed'"
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
