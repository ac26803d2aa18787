"""Schedulers as data: an order, groups of requests, an admission rule and what an overflow does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import CostModel
from optsched.policies.runner import Job, Order, Runner, too_long, waiting_rank
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode, Schedule
from optsched.workloads.predict import estimates

Group = Literal["waiting", "running", "running_decode", "running_prefill", "all"]
Admission = Literal["present", "lookahead", "reserve", "protect"]
Overflow = Literal["evict_latest", "clear", "evict_shortest"]
Lengths = Literal["predicted", "lower", "upper", "hindsight"]


@dataclass(frozen=True)
class Rules(Runner):
    """A scheduler as data, run by the compiled engine (003, Algorithm 1; 002, Algorithms 1, 2).

    Every batch goes through ``groups``, and within a group through its candidates, adding what
    the limits allow. A waiting candidate that is refused ends its group.

    Parameters
    ----------
    order : {"arrival", "prompt", "output", "total", "volume", "work", "random"}
        Ascending order of waiting requests (ties: arrival, index): prompt tokens s, predicted
        output o, s + o, s o + o (o + 1) / 2, or `own_work`.
    ties : {"arrival", "random"}
        ``"random"``: equals in the order of predicted output (which is then the present
        estimate) break at random, drawn anew each time that a request starts to wait.
    lengths : {"predicted", "lower", "upper", "hindsight"}
        Which prediction is the estimate of an output; see `optsched.workloads.predict.estimates`.
    margin : int
        Tokens added to every estimate (002, section 6).
    requeue : {"order", "back"}
        Where an evicted request waits: at its place in ``order``, or behind those that wait.
    groups : tuple of {"waiting", "running", "running_decode", "running_prefill", "all"}
        Running requests are taken in order of (arrival, index). ``"all"`` stands alone: waiting
        and running requests in one line, both by ``order``; what does not fit is passed over,
        and after a waiting request that is refused only running ones go on.
    admission : {"present", "lookahead", "reserve", "protect"}
        When a waiting request fits: its input fits beside what is held now (all of it is held
        from the admission on, also where its prefill is split into chunks); KV stays within
        capacity at every predicted completion (002, inequality (5)); the predicted peaks of all
        running requests fit together (eviction-free, 003); or what is held stays within
        (1 - alpha) of the capacity (002, section 5.2).
    alpha : float
        Share of the capacity protected by ``"protect"``.
    overflow : {"evict_latest", "clear", "evict_shortest"}
        When a running request lacks KV: evict the running requests of latest arrival (the last
        by ``order`` when the group is ``"all"``), the candidate itself last; or, before the
        batch, clear every running request independently with probability ``beta``, a batch's
        time passing for every further draw that is needed; or, before the batch, evict in
        ascending estimate (ties at random) until the rest fits, each one's estimate rising to
        the tokens it had produced (001, Algorithm 2).
    beta : float
    promote : bool
        Whether a running request that has reached its estimate is evicted, to wait behind all
        others with the upper prediction as its estimate (001, Algorithm 6).
    make_room : bool
        With ``"evict_shortest"``: whether the KV that completions free is kept for waiting
        requests, so that running ones past their estimate grow only as others of them leave.
    hybrid, chunked : bool
        Whether a batch may hold both phases, and whether a prefill may be split.
    max_batch_tokens, max_prefill_tokens, max_running : int, optional
        The scheduler's own C, P and R_max. P counts all tokens already in the batch (003,
        section 3.1). Without chunking a prompt beyond C or P runs alone.
    evict_mode : {"restart", "recompute"}
        What an eviction loses in seconds; in rounds only restart exists.
    in_rounds : Rules, optional
        Rules for instances in rounds, where they differ.
    wide : Rules, optional
        Rules for prediction intervals whose `interval_ratio` is below ``wide_below``.
    wide_below : float
    """

    order: Order = "arrival"
    ties: Literal["arrival", "random"] = "arrival"
    lengths: Lengths = "predicted"
    margin: int = 0
    requeue: Literal["order", "back"] = "order"
    groups: tuple[Group, ...] = ("running", "waiting")
    admission: Admission = "present"
    alpha: float = 0.0
    overflow: Overflow = "evict_latest"
    beta: float = 1.0
    promote: bool = False
    make_room: bool = False
    hybrid: bool = True  # type: ignore[misc]
    chunked: bool = False  # type: ignore[misc]
    max_batch_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_running: int | None = None
    evict_mode: EvictMode = "recompute"
    in_rounds: Rules | None = None
    wide: Rules | None = None
    wide_below: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise InputError(f"alpha: {self.alpha!r}; 0 <= alpha < 1 is right")
        if not 0 < self.beta <= 1:
            raise InputError(f"beta: {self.beta!r}; 0 < beta <= 1 is right")
        if len(set(self.groups)) < len(self.groups) or (
            "running" in self.groups and len(self.groups) > 2
        ):
            raise InputError(f"groups: {self.groups!r}; each request in one group is right")
        if "all" in self.groups and (len(self.groups) > 1 or self.requeue == "back"):
            raise InputError(
                f"groups: {self.groups!r}; 'all' alone, with requeue='order', is right"
            )
        if self.chunked and (self.overflow != "evict_latest" or self.promote):
            raise InputError(
                f"overflow: {self.overflow!r} knows no split prefills; chunked=False is right"
            )
        if self.margin < 0:
            raise InputError(f"margin: {self.margin!r}; an integer >= 0 is right")
        if self.ties == "random" and (
            self.order not in ("output", "random")
            or self.overflow == "evict_latest"
            or self.requeue == "back"
            or "all" in self.groups
        ):
            raise InputError(
                "ties: 'random' needs order 'output' or 'random', requeue 'order', and an overflow "
                "other than 'evict_latest'"
            )
        if self.make_room and self.overflow != "evict_shortest":
            raise InputError("make_room: needs overflow='evict_shortest'")
        if self.order == "random" and self.ties != "random":
            raise InputError("order: 'random' needs ties='random'")
        for name in ("max_batch_tokens", "max_prefill_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value!r}; an integer >= 1 is right")

    @property
    def running_order(self) -> Order:
        """Order in which running requests are taken, and from whose end they are evicted."""
        return self.order if "all" in self.groups else "arrival"

    @property
    def uses_predictions(self) -> bool:
        """Whether decisions depend on predicted output lengths."""
        return self.order in ("output", "total", "volume", "work") or self.admission in (
            "lookahead",
            "reserve",
        )

    def on(self, instance: Instance) -> tuple[Rules, EvictMode, bool, bool]:
        """Return the rules for an instance, their eviction mode, hybrid batching and chunking.

        A switch that the instance forbids is off.
        """
        rules = self.in_rounds if instance.in_rounds and self.in_rounds is not None else self
        if rules.wide is not None and interval_ratio(instance) < rules.wide_below:
            rules = rules.wide
        mode: EvictMode = "restart" if instance.in_rounds else rules.evict_mode
        hybrid = rules.hybrid and instance.hybrid_batching is not False
        chunked = rules.chunked and instance.chunked_prefill is not False
        return rules, mode, hybrid, chunked

    def run(self, job: Job) -> Schedule:
        """See `Runner.run`; the loop is `optsched.policies.engine.rules`."""
        from optsched.policies.engine import common, rules as loop

        instance = job.instance
        rules, mode, hybrid, chunked = self.on(instance)
        predicted, _ = estimates(instance, rules.lengths, rules.margin)
        second = estimates(instance, "upper", rules.margin)[0] if rules.promote else predicted
        requests = common.new_requests(instance, loop.REQUEST_FIELDS)
        requests["estimate"], requests["second"] = predicted, second
        requests["peak"] = instance.prompt_tokens + predicted - 1 + instance.kv_offset
        requests["rank"] = waiting_rank(rules.order, instance, predicted, job.cost)
        requests["priority"] = waiting_rank(rules.running_order, instance, predicted, job.cost)
        state = common.new_state(loop.STATE_FIELDS, instance)
        state["cleared_at"] = -1
        limits = common.limits_of(instance, mode)
        groups = (*(loop.GROUPS[group] for group in rules.groups), loop.NO_GROUP, loop.NO_GROUP)
        settings = loop.Settings(
            limits._replace(
                hybrid=hybrid,
                chunked=chunked,
                max_running=min(limits.max_running, rules.max_running or common.UNLIMITED),
            ),
            float(instance.clock_origin),
            groups[:3],  # type: ignore[arg-type]
            loop.ADMISSIONS[rules.admission],
            loop.OVERFLOWS[rules.overflow],
            (1.0 - rules.alpha) * instance.kv_capacity,
            float(rules.beta),
            rules.requeue == "back",
            rules.ties == "random",
            rules.order == "output",
            rules.promote,
            rules.make_room,
            bool((predicted < instance.output_tokens).any()),
            rules.max_batch_tokens or common.UNLIMITED,
            rules.max_prefill_tokens or common.UNLIMITED,
        )
        by_arrival = np.lexsort((np.arange(instance.n), instance.release))
        span = 2 + max(int(a.max()) for a in (predicted, second, instance.output_tokens))
        generator = np.random.default_rng(job.seed)
        columns = loop.run(
            requests, state, settings, job.cost.array, by_arrival, span,
            common.new_columns(instance), generator,
        )  # fmt: skip
        return common.schedule_of(job, mode, requests, state, columns, split=chunked)

    def uses_lengths(self, instance: Instance) -> bool:
        """Whether the form for the instance's time unit depends on predicted lengths."""
        return ((self.in_rounds if instance.in_rounds else None) or self).uses_predictions

    def allows(self, instance: Instance) -> str | None:
        """Return which prompt is too long, unless prefills are split."""
        split = self.chunked and instance.chunked_prefill is not False
        return None if split else too_long(instance)

    def waiting_rank(self, instance: Instance, cost: CostModel) -> NDArray[np.int64] | None:
        """Return the places in ``order``, by the true lengths, unless they are drawn."""
        order = self.on(instance)[0].order
        if order == "random":
            return None
        return waiting_rank(order, instance, instance.output_tokens, cost)

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """Return what an instance switches off of the rules for it."""
        return Runner.switched_off(self.on(instance)[0], instance)


def interval_ratio(instance: Instance) -> float:
    """Return alpha = l / u of the intervals' hull (001); 1 without intervals."""
    if instance.predicted_lower is None or instance.predicted_upper is None:
        return 1.0
    return float(instance.predicted_lower.min() / instance.predicted_upper.max())
