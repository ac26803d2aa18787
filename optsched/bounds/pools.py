r"""Bounds for pools of machines with roles, between which the KV of requests moves.

*What is claimed.* The bounds hold for every schedule on the given machines (`Fleet`) that keeps
three rules: a request's first token, or under ``recompute_last`` all its KV but that of the last
prompt token, comes from batches of a machine that may prefill it; every later token comes from a
batch of a machine that decodes; and between the two lies the move, of the link's time. Evictions,
pauses, chunks and any choice of machines are allowed. What moves occupy and the prompt token that
is computed again only add to this, and are left out. So is what a decode machine computes again.

*Stages.* Where no machine may both prefill and decode (a *split*), let P machines prefill and D
decode. What one batch takes is as in `optsched.bounds.checker.requests`, under the machine's own
cost model and capacity; machines of a stage are equal, and others are refused: a request may move
within its stage and take from each machine what is cheap there. A
request that restarts on a decode machine had its prefill before: token 1 is that of the run that
moved, which is no later than the one that counts.

*Work.* The batches of a machine are disjoint, and one of length T has room for T of own work and
shares. So P machines are one that is P times as fast, on which the k-th first token is no earlier
than under shortest remaining processing time (Schrage 1968); and the decode machines are one of D
times the speed, on which request i, released at a_i + its prefill and move alone, has received its
decode work by C_i. The second gives a bound on the sum of C_i. So does the first: C_i is at least
the first token's time plus the move and all later batches alone.

*Prices.* Let pi and rho be prices of time on prefill and on decode machines. Then, with the
notation of docs/formulations.md, "Prices of machine time",

    TEL >= sum_i (C_i - a_i) + sum_B int_B (pi or rho) - P int pi - D int rho,

since at most P batches prefill at any moment, and at most D decode. Token 1 pays out of batches at
pi, and later ones at rho, each as there. The chain has the move of time h_i:

    C_i >= sum_k theta_k tau_k + sum_k Theta_k T_k + theta_1 h_i,

as C_i >= tau_1 + T_1 / 2 + h_i + sum_{l > 1} T_l, and a later token begins no earlier than a_i plus
the prefill, the move and the batches before it, alone. Nothing else changes. theta_1 is any number
from 0 to 1: 1 where prefills are scarce, 0 where decodes are. Here theta_k is the part of latency's
weight that token k has, tau_k and T_k are the middle and the length of its batch, and Theta_k is
the weight of all tokens before it and half of its own. The sum of TTFTs is the total latency
of the same requests with one output token, whose h_i counts under ``recompute_last`` only.

*Pooled.* For any mixture of roles, deflection included, one price of time on all N machines and the
numbers of one of them give the bounds for N equal workers, without moves: N int pi is what
all machines can be paid. Where no machine is in both stages the better of both is taken.

*SLOs.* The count of `optsched.bounds.service` holds for each stage alone: what is prefilled in
[a_i, d1] fits on P machines, and what is decoded in [a_i + prefill and move alone, d2] on D.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from optsched.bounds.base import POOLS, Bound, BoundTask, Proof
from optsched.bounds.batch import PROVED_FOR, unavoidable_work
from optsched.bounds.busy_time import (
    Curve,
    Floats,
    Tokens,
    best_cap,
    capped,
    has_time,
    leaf_of,
    prices_of,
    quick_costs,
    schedule_prices,
    tokens_of,
)
from optsched.bounds.certificate import certify, cost_model_dict, verify_certificate
from optsched.bounds.checker.busy_time import Costs, check_busy_time
from optsched.bounds.checker.parts import Budget as StepBudget, Rejected, Unlimited
from optsched.bounds.checker.pools import check_work, part_of
from optsched.bounds.checker.requests import Part
from optsched.bounds.leaves import TICKS_PER_SECOND, seconds_of, work_leaf
from optsched.bounds.service import CLOCK, MARGIN, count_in_windows, longest_later
from optsched.costs.cost import BatchCost
from optsched.costs.fleet import Fleet
from optsched.costs.machine import Link, Machine
from optsched.problem.budget import Budget
from optsched.problem.errors import ViolationError
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits
from optsched.problem.service import with_spare

Leaf: TypeAlias = dict[str, Any]

_LINK = ("latency_s", "seconds_per_token")
# The columns of `Tokens` that prefill machines decide.
_OF_PREFILLS = ("arrival", "prefill", "prefill_paid", "first", "prefill_fixed")
_SAFETY = 1e-9
# Cells of prices at first and of the last ones, which are fewer if there are many requests: then so
# many for all requests together.
_CELLS, _FINE_CELLS, _MAX_CELLS = 8_000, 40_000, 200_000_000
# The values of theta_1 that are tried, of latency's weight.
_FIRST_WEIGHTS = (0.0, 0.5, 1.0)
_FIRST_CAP = 50.0


@dataclass(frozen=True, eq=False)
class Stages:
    """What requests cost at least in both stages, in seconds; columns have the shape (n,).

    ``tokens`` has first tokens on `prefill` machines and later ones on `decode` machines. ``moved``
    is what the move takes, ``work`` that of prefills and ``later`` that of all other tokens, and
    ``rest`` the time of later batches alone. Without a `split` both stages have all machines.
    ``before_first`` is the move where it comes before the first token, else 0.
    """

    tokens: Tokens
    moved: Floats
    work: Floats
    later: Floats
    rest: Floats
    prefill: int
    decode: int
    split: bool
    before_first: Floats

    @property
    def since(self) -> Floats:
        """The time from the arrival of a request until it can decode, alone."""
        return self.tokens.first + self.moved


def stages_of(instance: Instance, pools: Fleet) -> Stages:
    """Return what requests cost at least on pools.

    Some numbers are differences or products of floats, and are lowered by a margin for rounding.
    """
    prefill, decode, split = pools.stages
    peak = int((instance.prompt_tokens + instance.output_tokens).max())

    def costs_on(machines: Sequence[Machine]) -> tuple[Tokens, Floats, Floats, Floats]:
        """Return what tokens cost on some machines: prefills, later tokens, and these alone."""
        m = machines[0]  # all are alike, else there is no bound (`features_of_problem`)
        # An instance must have room for its largest request. More of it only lowers shares. An
        # optimum that is known is of other machines.
        capacity = max(m.capacity, peak)
        seen = replace(instance, kv_capacity=capacity, limits=m.limits_on(instance), known=None)
        assert isinstance(m.cost, BatchCost)
        work = unavoidable_work(seen, m.cost)
        later = np.maximum(work.total - work.prefill, 0.0) * (1 - _SAFETY)
        alone = np.maximum(work.chain - work.first, 0.0)
        return tokens_of(seen, m.cost), work.prefill, later, alone

    # First tokens cost what they do on prefill machines, and all others what on decode machines.
    first, work, _, _ = costs_on(prefill)
    after, _, later, rest = costs_on(decode)
    tokens = after._replace(**{name: getattr(first, name) for name in _OF_PREFILLS})

    # The last token of the prompt is not moved if the decode machine recomputes it. Then the move
    # comes before the first token. A prompt of one token is not recomputed (`Link.moved`).
    link = pools.link or Link()
    recomputes = link.recompute_last
    times = link.latency_s + (instance.prompt_tokens - int(recomputes)) * link.seconds_per_token
    moves = split & (instance.output_tokens > 1)
    moved = np.where(moves, times * (1 - _SAFETY), 0.0).astype(np.float64)
    is_before = recomputes & (instance.prompt_tokens > 1)
    before_first = np.where(is_before, moved, 0.0).astype(np.float64)
    machines = len(prefill), len(decode)
    return Stages(tokens, moved, work, later, rest, *machines, split, before_first)


def _first_tokens(stages: Stages) -> Stages:
    """Return what the requests cost if each had one output token.

    Then a move counts only where it comes before the first token.
    """
    none = np.zeros(len(stages.moved))
    tokens = stages.tokens._replace(steps=none)
    return replace(stages, tokens=tokens, moved=stages.before_first, later=none, rest=none)


def _curves(stages: Stages, share: float, cells: int) -> list[Curve]:
    """Return the prices of each stage, or of all machines in one.

    `share` is theta_1 of the module's text, the part of latency's weight that first tokens have.
    """
    tokens = stages.tokens
    if not stages.split:
        return [prices_of(tokens, cells, stages.decode)]

    # A request without later tokens has all of its weight on the first.
    theta = np.where(tokens.steps > 0, share, 1.0)

    def prices(release: Floats, length: Floats, weight: Floats, machines: int) -> Curve:
        """Return the prices of the schedule on one machine that is as fast as all of a stage."""
        # Who has no weight or no work in this stage is not part of its schedule. A stage without
        # any requests costs nothing.
        counts = (weight > 0) & (length > 0)
        if not counts.any():
            return np.zeros(1), 1.0

        # All machines together are paid the integral of the price of one such machine, so each of
        # them has a part of that price.
        price, width = schedule_prices(
            release[counts], length[counts] / machines, cells, weight[counts]
        )
        return price / machines, width

    first = prices(tokens.arrival, tokens.prefill_paid, theta, stages.prefill)
    later = tokens.machine - tokens.prefill_paid
    return [first, prices(tokens.arrival + stages.since, later, 1 - theta, stages.decode)]


def _from_prices(stages: Stages, part: Part, name: str, budget: Budget) -> tuple[int, Leaf]:
    """Return the bound of prices on a sum over requests (module's text), in ticks, and its leaf.

    ``name`` is ``tel`` or ``mean_ttft``, and ``part`` has the requests as the checker does. First
    the weight of first tokens is chosen, then for each stage the cap of its prices, and then
    the prices are computed on finer cells, as long as there is time. A cap splits each price of a
    curve: p2 is the price up to the cap, and p1 the rest (docs/formulations.md, "Prices of machine
    time"). Every cap gives a valid bound, and which is best is found by trying.
    """
    split = stages.split

    def prices_at(share: float) -> tuple[list[Curve], Costs]:
        """Return the prices of each stage at a weight of first tokens, and what they cost."""
        curves = _curves(stages, share, _CELLS)
        return curves, quick_costs(part, curves, name, _whole_weight(share) if split else None)

    def value(curves: list[Curve], costs: Costs, caps: Sequence[float]) -> int:
        """Return about what prices prove, with a cap for the p2 of each stage."""
        return costs.value([capped(*pair) for pair in zip(curves, caps, strict=True)])

    # There is a cap for each stage. Without a second stage there is no weight to choose.
    caps = [_FIRST_CAP] * (1 + split)
    shares = _FIRST_WEIGHTS if split and stages.tokens.steps.any() else (1.0,)
    share = shares[0]
    curves, costs = prices_at(share)
    for other in shares[1:]:
        if not has_time(budget):
            break

        tried = prices_at(other)
        if value(*tried, caps) > value(curves, costs, caps):
            share, (curves, costs) = other, tried

    def value_with_cap(k: int, cap: float) -> int:
        return value(curves, costs, [*caps[:k], cap, *caps[k + 1 :]])

    # A stage whose tokens have no weight has no prices to be cut.
    for k, has_prices in enumerate((share > 0, share < 1)[: len(caps)]):
        if has_prices:
            highest = float(curves[k][0].max())
            caps[k] = best_cap(
                partial(value_with_cap, k), caps[k], highest, lambda: has_time(budget)
            )

    def prove(curves: list[Curve]) -> tuple[int, Leaf]:
        """Return what the checker computes for prices, and the leaf that states them."""
        leaf, *later = map(leaf_of, curves, caps)
        # The leaf of a second stage is part of that of the first.
        for after in later:
            del after["relaxation"]
            leaf |= {"first": _whole_weight(share), "later": after}

        return check_busy_time(part, leaf, name, Unlimited()), leaf

    best = prove(curves)
    cells = min(_FINE_CELLS, _MAX_CELLS // len(stages.moved))
    if cells > _CELLS and has_time(budget):
        best = max(best, prove(_curves(stages, share, cells)), key=itemgetter(0))

    return best


def _whole_weight(share: float) -> int:
    """Return a weight as certificates state it, in 1 / 2**30."""
    return round(share * 2**30)


def pools_bound(task: BoundTask, budget: Budget) -> Proof:
    """Return the better bound of work and of prices on total latency or mean TTFT, in seconds."""
    assert task.pools is not None
    name, stages = task.goal.name, stages_of(task.instance, task.pools)
    stages = _first_tokens(stages) if name == "mean_ttft" else stages
    try:
        part = part_of(task.instance, stated(task.pools), TICKS_PER_SECOND, Unlimited())
        value, leaf = check_work(part, name), work_leaf()
        value, leaf = max(
            (value, leaf), _from_prices(stages, part, name, budget), key=itemgetter(0)
        )
    # Numbers that the checker refuses, since they are too large, prove nothing.
    except (Rejected, ArithmeticError):
        return Proof(0.0)

    terms = 1 if name == "tel" else task.instance.n
    value_s = seconds_of(max(value, 0), terms * TICKS_PER_SECOND)
    return Proof(value_s, tree={"leaf": leaf, "pools": task.pools})


def _max_within(stages: Stages, instance: Instance, limits: Mapping[str, Floats]) -> int:
    """Return how many requests can be within their SLOs at most (module's text, SLOs)."""
    # False: the limits are in seconds, where the judge's comparison has some spare.
    limits = {name: with_spare(v, instance.release, False) for name, v in limits.items()}

    # The longest times that are allowed: to the first token, from there to the last, and in all.
    first = np.minimum(limits["slo_ttft"], limits["slo_latency"])
    later = longest_later(instance, np.minimum(limits["slo_tpot"], limits["slo_gap"]))
    last = np.minimum(limits["slo_latency"], first + later)

    # All of these are times alone: of the move before the first token (or 0), from the arrival to
    # the first decode, and of all later batches. Others are not within their SLOs even so. (A
    # request that restarts on a decode machine has its first token behind the move, so that its
    # later batches alone have to fit in `later`.)
    before_first, since, rest = stages.before_first, stages.since, stages.rest
    able = (stages.tokens.first + before_first <= first) & (since + rest <= last)
    able &= rest <= later

    # Windows (begin, end, work, machines) of prefills, and of decodes; without roles the latter
    # have all work. A prefill leaves time for a move that comes before the first token. Windows are
    # a little wider than the clock of a judge may be off.
    slack = CLOCK * (1 + instance.release)
    earliest, latest = np.maximum(instance.release - slack, 0.0), instance.release + slack
    windows = [(earliest, latest + first - before_first, stages.work, stages.prefill)]
    if stages.split:
        ready, work = earliest + since * (1 - _SAFETY), stages.later
    else:
        ready, work = earliest, stages.work + stages.later

    windows.append((ready, latest + last, work, stages.decode))
    counts = (
        count_in_windows(begin[able], end[able], work[able] * (1 - MARGIN), machines)
        for begin, end, work, machines in windows
    )
    return min(int(able.sum()), *counts)


def within_pools(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on SLO attainment, or on SLO goodput: the max count over the shortest span.

    No schedule ends before any of its requests could alone.
    """
    assert task.pools is not None
    limits = all_limits(task.instance, None)
    # Attainment is the count over the number of requests, and goodput that over the span.
    stages, span = stages_of(task.instance, task.pools), float(task.instance.n)
    if task.goal.name == "slo_goodput":
        span = float((stages.tokens.arrival + stages.since + stages.rest).max()) * (1 - MARGIN)

    return Proof(_max_within(stages, task.instance, limits) / span)


def stated(pools: Fleet) -> dict[str, Any]:
    """Return pools as a certificate states them: the machines of each stage, and the link.

    All machines of a stage are equal, so one stands for them.
    """
    prefill, decode, split = pools.stages
    named = {"prefill": prefill, "decode": decode} if split else {"mixed": prefill}
    fields: dict[str, Any] = {}
    for name, machines in named.items():
        m = machines[0]
        assert isinstance(m.cost, BatchCost)
        fields[name] = {
            "machines": len(machines),
            "kv_capacity": m.kv_capacity,
            "limits": {} if m.limits is None else m.limits.as_dict(),
            "cost_model": cost_model_dict(m.cost),
        }

    if split:
        link = pools.link or Link()
        times = {name: repr(float(getattr(link, name))) for name in _LINK}
        fields["link"] = {**times, "recompute_last": link.recompute_last}

    return fields


def certify_pools(
    instance: Instance, objective: str, tree: Mapping[str, Any], budget: StepBudget | None = None
) -> dict[str, Any]:
    """Return the certificate of the tree of a proof of `pools_bound`, ``tel`` or ``mean_ttft``.

    Each pool states its own cost model; the certificate's is that of the first.
    """
    cost = tree["pools"].stages[0][0].cost
    assert isinstance(cost, BatchCost)
    return certify(instance, cost, objective, tree["leaf"], stated(tree["pools"]), budget)


def verify_pools(instance: Instance, certificate: dict[str, Any], pools: Fleet) -> float:
    """Return the value that a certificate proves of pools, once it is checked.

    Parameters
    ----------
    instance : Instance
    certificate : dict
    pools : Fleet

    Raises
    ------
    ViolationError
        If it proves nothing, or something of other pools.
    """
    value = verify_certificate(instance, certificate, on_pools=True)
    # Under tabulated cost models it is about one choice of linear minorants.
    if certificate.get("pools") not in [stated(fleet) for fleet in pools.on(instance).minorants]:
        raise ViolationError("certificate: pools: found other ones", rule="certificate")

    return value


_WORDS = "work, and prices of machine time, of pools that prefill and that decode"
_IN_TIME = "work of pools in the windows of SLOs"
_METRICS = ("tel", "mean_ttft")
_PROVED = PROVED_FOR | POOLS
_SERVED = ("slo_attainment", "slo_goodput")
POOLED = Bound(
    "pools", _WORDS, "second", _METRICS, pools_bound, _PROVED, searches=True, needs=POOLS
)
POOLED_IN_TIME = Bound("slo-pools", _IN_TIME, "second", _SERVED, within_pools, _PROVED, needs=POOLS)
