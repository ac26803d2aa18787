"""The round model as a domain-independent dynamic program, for didppy: a rival and an oracle.

A state has the requests that are left, and the KV that what runs holds in the present round and in
those to come. A request is placed, or a round passes. Of two states with the same requests left
(and the same round, where requests arrive), the one that holds no more KV in any round dominates.

*All at 0: time runs backward.* A request is placed at its completion, with its peak, and loses a
token per round. KV is then largest at once, so that one comparison says whether a request fits.
A round costs one for each request placed. Let U be those left, m the others, and R the rounds that
are still to pass. Each of the m pays R, and those in U complete within these R rounds of
forward time. R M is at least the volume of U and what is still held.

*With arrivals: time runs forward.* A request pays its latency when it starts. Those left pay their
outputs and the rounds that they have waited.

In both, requests left complete after the first round, or after now, the k-th not before the k-th
smallest output, nor before the k smallest volumes fit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from optsched import Instance


class Found(NamedTuple):
    """What a run knows: a schedule's value and starts, if one was found, and a proved bound."""

    value: int | None
    starts: list[int] | None
    bound: int


def solve(instance: Instance, *, known: int | None = None, time_limit_s: float = 60.0) -> Found:
    """Run complete anytime beam search, which looks only for values below ``known``."""
    import didppy

    timed = len(set(instance.arrival.tolist())) > 1
    model, requests = (forward if timed else backward)(instance)
    options = {} if known is None else {"primal_bound": known}
    search = didppy.CABS(model, time_limit=time_limit_s, quiet=True, threads=1, **options)
    solution = search.search()
    if solution.cost is None or not solution.transitions:
        bound = known if solution.is_infeasible else solution.best_bound
        return Found(None, None, int(bound or instance.output_tokens.sum()))
    steps = [requests[step.name] for step in solution.transitions]
    starts, now = [0] * instance.n, 0 if timed else steps.count(None)
    for i in steps:
        if i is None:
            now += 1 if timed else -1
        else:
            starts[i] = now - (0 if timed else int(instance.output_tokens[i]))
    bound = solution.cost if solution.is_optimal else solution.best_bound
    first = int(instance.arrival.min())
    return Found(int(solution.cost), [first + t for t in starts], int(bound or 0))


class _Program:
    """What both directions share."""

    def __init__(self, instance: Instance) -> None:
        import didppy

        self.dp, n = didppy, instance.n
        self.n, self.capacity = n, instance.kv_capacity
        self.arrival = (instance.arrival - instance.arrival.min()).astype(int).tolist()
        self.first = (instance.prompt_tokens + instance.kv_offset).tolist()
        self.output = instance.output_tokens.tolist()
        self.model = didppy.Model(maximize=False, float_cost=False)
        request = self.model.add_object_type(n)
        self.left = self.model.add_set_var(request, target=list(range(n)))
        self.placed = self.model.add_element_var(self.model.add_object_type(n + 1), target=0)
        self.turn = self._resource()  # those placed in one round are in ascending order
        self.held = [self._resource() for _ in range(max(self.output))]
        smallest = -(-np.cumsum(np.sort(instance.volume)) // self.capacity)
        ends = np.maximum(smallest, np.sort(instance.output_tokens))
        # The least sum of completions, by the number of requests placed before.
        self.ends = self.model.add_int_table([int(ends[:q].sum()) for q in range(n, -1, -1)])
        self.requests: dict[str, int | None] = {"round": None}

    def _resource(self) -> Any:
        return self.model.add_int_resource_var(target=0, less_is_better=True)

    def place(self, i: int, held: list[int], cost: Any, conditions: list[Any]) -> None:
        """Add the transition that places a request, which then holds so much from now on."""
        kind = (self.arrival[i], self.first[i], self.output[i])
        twins = [j for j in range(i) if (self.arrival[j], self.first[j], self.output[j]) == kind]
        effects = [
            (self.left, self.left.remove(i)), (self.placed, self.placed + 1), (self.turn, i),
            *((self.held[d], self.held[d] + tokens) for d, tokens in enumerate(held)),
        ]  # fmt: skip
        conditions = [self.left.contains(i), self.turn <= i, *conditions]
        conditions += [~self.left.contains(j) for j in twins[-1:]]
        self.requests[f"place {i}"] = i
        self._transition(f"place {i}", cost, effects, conditions)

    def round(self, cost: Any, effects: list[Any], condition: Any) -> None:
        """Add the transition that lets a round pass."""
        shifted = [*pairwise(self.held), (self.held[-1], 0)]
        self._transition("round", cost, [(self.turn, 0), *shifted, *effects], [condition])

    def _transition(self, name: str, cost: Any, effects: Any, conditions: Any) -> None:
        total = cost + self.dp.IntExpr.state_cost()
        self.model.add_transition(
            self.dp.Transition(name, total, effects=effects, preconditions=conditions)
        )


def backward(instance: Instance) -> tuple[Any, dict[str, int | None]]:
    """Return the model for requests that all arrive at once, and what each transition places."""
    p = _Program(instance)
    for i in range(p.n):
        peak = p.first[i] + p.output[i] - 1
        held = [peak - d for d in range(p.output[i])]
        p.place(i, held, 0, [p.held[0] <= p.capacity - peak])
    placed = p.n - p.left.len()
    p.round(placed, [], p.held[0] > 0)
    p.model.add_base_case([p.left.is_empty(), p.held[0] == 0])
    volume = p.model.add_int_table(instance.volume.tolist())
    tokens: Any = volume[p.left] + (p.capacity - 1)
    for held in p.held:
        tokens += held
    p.model.add_dual_bound(placed * (tokens // p.capacity) + p.ends[p.placed])
    return p.model, p.requests


def forward(instance: Instance) -> tuple[Any, dict[str, int | None]]:
    """Return the model for requests that arrive, and what each transition starts."""
    p = _Program(instance)
    now = p.model.add_int_var(target=0)
    for i in range(p.n):
        held = [p.first[i] + d for d in range(p.output[i])]
        fits = [p.held[d] <= p.capacity - tokens for d, tokens in enumerate(held)]
        p.place(i, held, now + (p.output[i] - p.arrival[i]), [now >= p.arrival[i], *fits])
    some = (p.held[0] > 0) | (now < max(p.arrival))
    p.round(0, [(now, now + 1)], some & ~p.left.is_empty())
    p.model.add_base_case([p.left.is_empty()])
    outputs, arrivals = p.model.add_int_table(p.output), p.model.add_int_table(p.arrival)
    waited: Any = 0
    for i in range(p.n):
        waited += p.left.contains(i).if_then_else(p.dp.max(0, now - p.arrival[i]), 0)
    p.model.add_dual_bound(outputs[p.left] + waited)
    after = p.ends[p.placed] + now * p.left.len() - arrivals[p.left]
    p.model.add_dual_bound(p.dp.max(0, after))
    return p.model, p.requests
