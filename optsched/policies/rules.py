"""Schedulers as data: an order, groups of requests, an admission rule and an overflow rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.costs.cost import BatchCost
from optsched.policies.runner import (
    ANEW,
    DUE,
    Admission,
    Group,
    Job,
    Order,
    Overflow,
    Runner,
    Workers,
    attained,
    latest_start,
    order_key,
    own_work,
    too_long,
)
from optsched.problem.columns import check_fields
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode
from optsched.workloads.predict import estimates

if TYPE_CHECKING:  # the loop is loaded by those who run it
    from optsched.judge.life import Records
    from optsched.judge.replay import Limits

Caching = Literal["none", "lru", "next-use"]
Lengths = Literal["predicted", "lower", "upper", "hindsight"]


@dataclass(frozen=True)
class Rules(Runner):
    """A scheduler as data, run by the compiled engine.

    It covers Kim et al. 2024, Algorithm 1, and Jaillet et al. 2025, Algorithms 1 and 2. Every
    batch is formed group by group, and within a group candidate by candidate, with all that the
    limits allow. A waiting candidate that is refused ends its group.

    Parameters
    ----------
    order : {"arrival", "prompt", "output", "total", "volume", "work", "deadline", "slack", ..}
        What waiting requests are sorted by, ascending (ties: arrival, index). With prompt tokens
        s and predicted output o, ``"total"`` is s + o, ``"volume"`` is s o + o (o + 1) / 2, and
        ``"work"`` is `own_work`. ``"ratio"`` is the prefill over the time waited, and
        ``"response"`` the same of all calls of the session so far; by these two the queue is
        sorted anew before each batch. ``"deadline"`` is when the first token is due by
        ``slo_ttft``, and ``"slack"`` the time until then that the prefill leaves.
    ties : {"arrival", "random"}
        How requests of equal predicted output are ordered. With ``"random"`` the order is by the
        present estimates, and ties are drawn anew each time that a request starts to wait.
    lengths : {"predicted", "lower", "upper", "hindsight"}
        Which prediction is the estimate of an output; see `optsched.workloads.predict.estimates`.
    margin : int
        Tokens added to every estimate, >= 0 (Jaillet et al. 2025, section 6).
    requeue : {"order", "back"}
        Where an evicted request waits: at its place in ``order``, or behind those that wait.
    groups : tuple of {"waiting", "running", "running_decode", "running_prefill", "prefill", "all"}
        The groups of candidates, in order. Running requests are taken by (arrival, index).
        ``"prefill"`` is the first waiting request and all prefills that have begun, in ascending
        seconds of what is left of them: a long prefill pauses while shorter ones run. With the
        order ``"work"``, the decodes to come, as predicted, count as well.
        ``"all"`` is allowed only alone: waiting and running requests then stand in one line, both
        by ``order``, and a request that does not fit is passed over. Once a waiting request is
        refused, only running ones go on.
    admission : {"present", "lookahead", "reserve", "protect"}
        When a waiting request fits. ``"present"``: its input fits beside the KV that is held now.
        All of the input is held from the admission on, also where the prefill is split.
        ``"lookahead"``: KV stays within capacity at every predicted completion (Jaillet et al.
        2025, inequality (5)). ``"reserve"``: the predicted peaks of all running requests fit
        together (eviction-free, Kim et al. 2024). ``"protect"``: the KV held stays within
        (1 - alpha) of the capacity (Jaillet et al. 2025, section 5.2); but with the overflow
        ``"evict_latest"`` a request that nothing else runs beside may take all of it.
    alpha : float
        Share of the capacity that ``"protect"`` keeps free, 0 <= alpha < 1.
    overflow : {"evict_latest", "clear", "evict_shortest"}
        What happens when running requests lack KV. ``"evict_latest"``: the running requests of
        latest arrival are evicted (the last by ``order`` when the group is ``"all"``), the
        candidate itself last. ``"clear"``: before the batch, every running request is cleared
        independently with probability ``beta``; the time of a batch passes for every further
        draw that is needed. ``"evict_shortest"``: before the batch, requests are evicted in
        ascending estimate (ties at random) until the rest fits; the estimate of each rises to the
        tokens that it had produced (Chen, Ye and Zhou 2025, Algorithm 2).
    beta : float
        Probability that ``"clear"`` clears a running request, 0 < beta <= 1.
    promote : bool
        Whether a running request that has reached its estimate is evicted. It then waits behind
        all others, with the upper prediction as its estimate (Chen, Ye and Zhou 2025,
        Algorithm 6).
    make_room : bool
        Whether the KV that completions free is kept for waiting requests. Running requests past
        their estimates then grow only as others of them leave. It needs ``"evict_shortest"``.
    late_last : bool
        Whether a waiting request that can no longer have its first token in time stands behind all
        that can.
    paced : bool
        Whether a batch that prefills ends before any running request falls behind its ``slo_tpot``:
        with k tokens, the next is due k times this limit after the first. It needs chunked prefill.
    hold : float
        While others can be prefilled, requests that are more than so many tokens ahead of their
        pace do not decode, >= 1. It needs ``paced``.
    gate : float
        Which prefills run beside decodes, > 0; it needs the groups ``"running_decode"`` and
        ``"prefill"``. A prefill of w seconds delays k decodes by w each. Where it waits for them
        instead, it and q - 1 others wait for D seconds, the mean time that they still need. So it
        runs if ``w <= gate D max(1, q / k)``. D is the time of a decode step of one short request,
        times the tokens that are left: by prediction with the order ``"work"``, else as many as
        the tokens seen so far over the number of requests that have finished.
    piece : float
        A prefill ends where its batch has taken the time of so many of these steps, > 0. It needs
        chunked prefill.
    patient : bool
        Whether prefills also wait for decodes that end soon, and for so many others that the fixed
        cost of their batch is worth it; it needs the group ``"prefill"``. In a system of N requests
        of which k decode, a prefill of w seconds waits for the next m completions, t seconds away,
        if ``m w > c t N / k``, where c is the mean of 1 / (1 - load) for the work of decodes and 1
        for that of prefills (docs/policies/pausing.md). With a cache they do not wait for others.
    cheap : bool
        Whether a batch holds at most the `BatchCost.cheap_tokens` of a tabulated cost model.
    caching : {"none", "lru", "next-use"}
        What leaves the prefix cache first where requests share prefixes: the block that was used
        the longest ago, or the one whose next user comes last, which only a clairvoyant scheduler
        knows (with sessions nobody does, and it is the former). Waiting requests then stand in the
        order of the prefill that the cache leaves them. A prefill that pauses leaves its blocks to
        the cache, which counts as an eviction. It needs the group ``"prefill"``.
    served : tuple of int, optional
        All requests in the order in which next use expects them; None: that of their releases.
    hybrid, chunked : bool
        Whether a batch may hold both phases, and whether a prefill may be split.
    max_batch_tokens, max_prefill_tokens, max_running : int, optional
        The scheduler's own C, P and R_max, >= 1. P counts all tokens already in the batch (Kim et
        al. 2024, section 3.1). Without chunking a prompt longer than C or P runs alone.
    gather : int
        So many waiting requests begin together, unless nothing runs, >= 1. Where predictions count,
        these are requests with predicted outputs of as many binary digits.
    evict_mode : {"restart", "recompute"}
        What an eviction loses on instances in seconds; in rounds every eviction is a restart.
    in_rounds : Rules, optional
        Rules for instances in rounds, where they differ.
    wide : Rules, optional
        Rules where the smallest lower over the largest upper prediction is below ``wide_below``.
    wide_below : float
        See ``wide``.

    Raises
    ------
    InputError
        If a value is out of its range, or if values do not go together.
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
    late_last: bool = False
    paced: bool = False
    hold: float = math.inf
    gate: float = math.inf
    piece: float = math.inf
    patient: bool = False
    cheap: bool = False
    caching: Caching = "none"
    served: tuple[int, ...] | None = None
    hybrid: bool = True  # type: ignore[misc]
    chunked: bool = False  # type: ignore[misc]
    max_batch_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_running: int | None = None
    gather: int = 1
    evict_mode: EvictMode = "recompute"
    in_rounds: Rules | None = None
    wide: Rules | None = None
    wide_below: float = 0.0

    def __post_init__(self) -> None:
        # Names for the settings that the checks below combine.
        groups, all_in_one = self.groups, "all" in self.groups
        # With "running" a third group could only take running requests a second time.
        disjoint = len(set(groups)) == len(groups) and not ("running" in groups and len(groups) > 2)
        has_prefill = groups == ("running_decode", "prefill")
        evicts_latest = self.overflow == "evict_latest"
        evicts_shortest = self.overflow == "evict_shortest"
        keeps_place, draws = self.requeue == "order", self.ties == "random"
        # For "all", where waiting and running requests stand in one line, by `order` alone.
        one_line = keeps_place and len(groups) == 1
        sorts_anew = self.gather > 1 or self.order in ANEW
        caches = self.caching != "none"
        # Evictions take place only while a batch is formed.
        plain = evicts_latest and not self.promote
        steady = not (self.promote or all_in_one or draws)
        may_draw = self.order in ("output", "random") and keeps_place
        may_draw = may_draw and not (evicts_latest or all_in_one)
        may_pause = has_prefill and self.chunked and plain

        # What is expected, where several checks say it or a line would be too long.
        for_draws = (
            "with it order 'output' or 'random', requeue 'order', groups without 'all', and an "
            "overflow other than 'evict_latest'"
        )
        for_plain = "overflow='evict_latest' and no promote"
        for_pauses = f"with 'prefill' only 'running_decode' before it, chunked prefill, {for_plain}"
        for_steady = "no promote, random ties or 'all' with it"
        for_prefill = "groups with 'prefill' with it"
        for_shortest = "overflow='evict_shortest' with it"
        for_caches = f"no gather, no order of {', '.join(ANEW)} with it"

        # Field, what must hold, and what is expected. The first that fails is reported.
        checks = (
            ("alpha", 0 <= self.alpha < 1, "0 <= alpha < 1"),
            ("beta", 0 < self.beta <= 1, "0 < beta <= 1"),
            ("margin", self.margin >= 0, "an integer >= 0"),
            ("groups", disjoint, "each request in one group"),
            ("groups", one_line or not all_in_one, "'all' alone, requeue='order'"),
            ("order", draws or self.order != "random", "ties='random' with it"),
            ("ties", may_draw or not draws, for_draws),
            ("chunked", plain or not self.chunked, f"{for_plain} with it"),
            ("make_room", evicts_shortest or not self.make_room, for_shortest),
            ("late_last", steady or not self.late_last, for_steady),
            ("paced", self.chunked or not self.paced, "chunked prefill with it"),
            ("hold", self.hold >= 1, "hold >= 1"),
            ("groups", may_pause or "prefill" not in groups, for_pauses),
            ("gate", self.gate > 0, "gate > 0"),
            ("piece", self.piece > 0, "piece > 0"),
            ("gate", has_prefill or self.gate == math.inf, for_prefill),
            ("caching", self.caching in get_args(Caching), "none, lru or next-use"),
            ("caching", has_prefill or not caches, for_prefill),
            ("caching", not (caches and sorts_anew), for_caches),
            ("gather", self.gather >= 1, "an integer >= 1"),
            ("order", steady or not sorts_anew, for_steady),
            ("patient", has_prefill or not self.patient, for_prefill),
            ("piece", self.chunked or self.piece == math.inf, "chunked prefill with it"),
        )
        for name, holds, expected in checks:
            if not holds:
                raise InputError(f"{name}: found {getattr(self, name)!r}; expected {expected}")

        check_fields(self, {"max_batch_tokens": 1, "max_prefill_tokens": 1, "max_running": 1})

    @property
    def uses_predictions(self) -> bool:
        """Whether decisions depend on predicted output lengths."""
        return (
            self.order in ("output", "total", "volume", "work")
            or self.admission in ("lookahead", "reserve")
            or self.caching == "next-use"
        )

    def on(self, instance: Instance) -> tuple[Rules, EvictMode, bool, bool]:
        """Return the rules that apply to an instance.

        Parameters
        ----------
        instance : Instance

        Returns
        -------
        rules : Rules
            These rules, or ``in_rounds``, or ``wide``.
        evict_mode : {"restart", "recompute"}
        hybrid, chunked : bool
            The switches of the rules, off where the instance forbids them.
        """
        rules = self.in_rounds if instance.in_rounds and self.in_rounds is not None else self
        lower, upper = instance.predicted_lower, instance.predicted_upper
        if rules.wide is not None and lower is not None and upper is not None:
            rules = rules.wide if lower.min() / upper.max() < rules.wide_below else rules

        mode: EvictMode = "restart" if instance.in_rounds else rules.evict_mode
        hybrid = rules.hybrid and instance.hybrid_batching is not False
        chunked = rules.chunked and instance.chunked_prefill is not False
        return rules, mode, hybrid, chunked

    def prepared(self, job: Job, caching: bool = False) -> tuple[Records, Records, Limits]:
        """Return what the loop begins with.

        Parameters
        ----------
        job : Job
        caching : bool
            Whether prefixes are cached.

        Returns
        -------
        requests, state : ndarray of records
        limits : optsched.judge.replay.Limits
        """
        from optsched.judge.life import UNLIMITED
        from optsched.judge.replay import limits_of
        from optsched.policies.engine import common, prefills

        instance = job.instance
        rules, mode, hybrid, chunked = self.on(instance)
        predicted, _ = estimates(instance, rules.lengths, rules.margin)
        fields = prefills.CACHE_FIELDS if caching else prefills.REQUEST_FIELDS
        requests = common.new_requests(instance, fields)
        requests["estimate"] = requests["second"] = predicted
        # A request that is promoted has its upper prediction as the second estimate.
        if rules.promote:
            requests["second"] = estimates(instance, "upper", rules.margin)[0]

        # A request holds most in its last batch: its prompt and all output tokens but the last.
        requests["peak"] = instance.kv_of(instance.prompt_tokens + predicted - 1)
        requests["pace"] = np.inf if instance.slo_tpot is None else instance.slo_tpot
        requests["late_after"] = latest_start(instance, job.cost) if rules.late_last else np.inf
        # The work of the decodes alone: that of the request less that of its first token.
        if "prefill" in rules.groups and rules.order == "work":
            prompt = instance.prompt_tokens
            requests["later"] = own_work(prompt, predicted, job.cost)
            requests["later"] -= own_work(prompt, np.ones_like(predicted), job.cost)

        requests["order"] = order_key(rules.order, instance, predicted, job.cost)
        state = rules._state(job)
        # Only then does the loop look for requests that are past their estimates.
        state["short"] = (predicted < instance.output_tokens).any()
        # The group of a request, for `gather`, is named by its first request.
        if state[0].sorting != prefills.RANKED:
            mates = rules.mates(instance)
            _, first, group = np.unique(mates, return_index=True, return_inverse=True)
            requests["group"] = first[group]

        limits = limits_of(instance, mode)
        max_running = min(limits.max_running, rules.max_running or UNLIMITED)
        limits = limits._replace(hybrid=hybrid, chunked=chunked, max_running=max_running)
        return requests, state, limits

    def _state(self, job: Job) -> Records:
        """Return the state of the loop before the first batch, with what these rules say.

        Words become their places in `Group`, `Admission` and `Overflow`, for compiled code.
        """
        from optsched.judge.life import UNLIMITED
        from optsched.policies.engine import common, prefills

        state = common.new_state(prefills.STATE_FIELDS, job.instance)
        for name, _ in prefills.SETTINGS:
            state[name] = getattr(self, name)

        groups = [get_args(Group).index(group) for group in self.groups]
        groups += [prefills.NO_GROUP] * (3 - len(groups))
        state["first_group"], state["second_group"], state["third_group"] = groups
        state["admission"] = get_args(Admission).index(self.admission)
        state["overflow"] = get_args(Overflow).index(self.overflow)
        state["threshold"] = (1.0 - self.alpha) * job.instance.kv_capacity
        state["requeue_back"] = self.requeue == "back"
        state["random_ties"] = self.ties == "random"
        state["by_estimate"], state["by_work"] = self.order == "output", self.order == "work"
        state["sorting"] = prefills.IN_GROUPS if self.gather > 1 else prefills.RANKED
        if self.order in ANEW:
            state["sorting"] = prefills.BY_RATIO
        state["cleared_at"] = -1  # nobody has been cleared (`evictions._count_clearing`)
        batch = self.max_batch_tokens or UNLIMITED
        if self.cheap and isinstance(job.cost, BatchCost):
            batch = min(batch, job.cost.cheap_tokens or UNLIMITED)

        state["max_batch_tokens"] = batch
        state["max_prefill_tokens"] = min(batch, self.max_prefill_tokens or UNLIMITED)
        # `gate` and `piece` count decode steps of one short request, the loop seconds.
        cost, one_decode = job.cost.array, add_decode(EMPTY, 1)
        step = float(batch_time(cost, one_decode))
        with_prefill = add_prefill(one_decode, 1, 0)
        two_prefills = batch_time(cost, add_prefill(with_prefill, 1, 0))
        # Constants follow from a second request of a kind. With t(decodes, prefills) they are
        # fixed = 2 t(1, 0) - t(2, 0) and setup = 2 t(1, 1) - t(1, 0) - t(1, 2).
        state["fixed"] = 2 * step - batch_time(cost, add_decode(one_decode, 1))
        state["setup"] = 2 * batch_time(cost, with_prefill) - step - two_prefills
        state["gate"] *= step
        state["piece"] *= step
        return state

    def mates(self, instance: Instance) -> NDArray[np.int64]:
        """Return a number for each request that is the same for those of its group.

        Groups are by the number of binary digits of predicted outputs, where these count.

        Parameters
        ----------
        instance : Instance
        """
        if self.uses_predictions:
            predicted, _ = estimates(instance, self.lengths, self.margin)
            return np.asarray(np.log2(predicted).astype(np.int64))

        return np.zeros(instance.n, dtype=np.int64)

    def begin(self, job: Job, workers: int) -> Workers:
        """See `Runner.begin`. The loop is in `optsched.policies.engine.rules`.

        Beside the records it has for each worker a generator and, where prefixes are cached, a
        cache; None: nothing is cached.
        """
        from optsched.policies.engine import blocks, common, rules as loop

        rules = self.on(job.instance)[0]
        caching = rules.caching != "none" and job.instance.prefixes is not None
        requests, state, limits = self.prepared(job, caching)
        # A projection reaches up to the last batch of the longest request, and a little further.
        lengths = (requests["estimate"], requests["second"], requests["output"])
        ahead = 3 + max(int(column.max()) for column in lengths)
        order = rules.order
        caches: Sequence[blocks.Store] = [None] * workers
        if caching:
            # With sessions nobody knows the next user. No copy has a time to live, and equal blocks
            # are merged.
            eviction = "lru" if job.instance.sessions is not None else rules.caching
            cache_settings = (limits.max_running, (eviction, 0.0), True, rules.served)
            caches = blocks.caches_of(job.instance, requests, state, workers, *cache_settings)

        def released(request: int, at: float) -> None:
            """Write what follows from a request's release, in an instance with sessions."""
            requests["late_after"][request] += at
            if order in DUE:
                requests["order"][request] += at
            if order in ("attained", "response"):
                work, took = attained(job, requests, request, at)
                requests["order"][request] += work
                requests["count"][request] = took

        own = [(job.coins(worker), cache) for worker, cache in enumerate(caches)]
        run = common.Loop(loop.run, own, released, ahead)
        return common.Compiled(job, requests, state, limits, run, workers)

    def uses_lengths(self, instance: Instance) -> bool:
        """See `Runner.uses_lengths`. The rules for the instance's time unit give the answer."""
        return ((self.in_rounds if instance.in_rounds else None) or self).uses_predictions

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`. A prompt may be too long unless prefills are split."""
        if (self.late_last or self.order in ("deadline", "slack")) and instance.slo_ttft is None:
            return "the instance has no slo_ttft, by which the policy decides"
        if self.paced and instance.slo_tpot is None:
            return "the instance has no slo_tpot, by which the policy decides"

        return None if self.chunked else too_long(instance)

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """See `Runner.switched_off`. The switches are those of the rules for the instance."""
        return Runner.switched_off(self.on(instance)[0], instance)
