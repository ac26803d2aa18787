"""A machine, which is one worker of a fleet, and the link over which KV moves between machines."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from optsched.costs.cost import BatchCost, CostModel, UnitCost, warn_of_default
from optsched.costs.load import cost_for, load_cost_model
from optsched.problem.columns import INT64_MAX, check_choice, whole_number
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance, Limits

Role = Literal["mixed", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What machines are for. The first letter says it in ``2p6d``, and the place in compiled loops."""


@dataclass(frozen=True, eq=False)
class Machine:
    """A worker of a fleet.

    Parameters
    ----------
    cost_model : BatchCost, str or path, optional
        Its batch times, or the name or file of them. None: every batch takes one round.
    kv_capacity : int, optional
        Maximum number of KV tokens that it holds at any time. None: the instance's.
    limits : Limits, optional
        Hard limits of each of its batches, in place of the instance's that it names.
    role : {"mixed", "prefill", "decode"}
        What it is for. A prefill machine makes no output token but the first of a request, and a
        decode machine prefills only what it has lost.
    """

    cost_model: CostModel | str | Path | None = None
    kv_capacity: int | None = None
    limits: Limits | None = None
    role: Role = "mixed"

    def __post_init__(self) -> None:
        check_choice(self.role, "machine: role", ROLES)
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise InputError(f"machine: limits: found {self.limits!r}; expected an optsched.Limits")

        if self.kv_capacity is not None:
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

    @property
    def capacity(self) -> int:
        """The KV capacity of a machine that has one (`on`)."""
        assert self.kv_capacity is not None
        return self.kv_capacity

    def on(self, instance: Instance) -> "Machine":
        """Return the machine with an instance's KV capacity and limits where it has none.

        Parameters
        ----------
        instance : Instance
        """
        cost = cost_for(instance, self.cost_model)
        if self.kv_capacity is None and isinstance(cost, BatchCost):
            warn_of_default(instance, cost)

        capacity = self.kv_capacity or instance.kv_capacity
        limits = self.limits_on(instance)
        return replace(self, cost_model=cost, kv_capacity=capacity, limits=limits)

    def limits_on(self, instance: Instance) -> Limits:
        """Return an instance's limits, and in place of some those of the machine.

        Parameters
        ----------
        instance : Instance
        """
        own = {} if self.limits is None else self.limits.as_dict()
        return replace(instance.limits, **own)


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
