"""Changes of a server of vLLM: which ones `diagnose` tries, and which of them comes first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.instance import Instance
from optsched.problem.specs import parse_spec, read_pairs

LIMITS = ("max_num_seqs", "max_num_batched_tokens")
"""The settings that limit a batch, by vLLM's names."""
WORTH = 0.05
"""The gain below which nothing is worth changing."""
# Of changes that cost as much, the first that gains this share of the largest gain is preferred.
_PREFERRED = 0.8
# Small limits of tokens in a batch, tried on every server that has more.
_SMALL = 256, 512
# Settings that have another name as an option of ``vllm serve``.
_FLAGS = {"policy": "scheduling-policy", "prefix_caching": "enable-prefix-caching"}


class Change(NamedTuple):
    """A change of the server, and what the twin gains by it.

    Attributes
    ----------
    what, kind : str
        The setting and its new value, and whether it takes settings, the plug-in for vLLM, memory,
        workers (one more) or further workers.
    gain, low, high : float
        The share of the loss that it takes away: of requests that miss their SLOs, or of the mean
        latency; and the range under all cost models tried.
    sure : float
        The share of these cost models under which it gains anything worth it.
    extrapolated : bool
        Whether its batches are larger than any of the measured run.
    metrics : dict
        The metrics of the twin with the change.
    """

    what: str
    kind: str
    gain: float
    low: float
    high: float
    sure: float
    extrapolated: bool
    metrics: dict[str, Any]

    @property
    def percents(self) -> tuple[int, ...]:
        """``gain``, ``low`` and ``high`` in percent, of which none is below -100."""
        return tuple(round(100 * max(share, -1)) for share in (self.gain, self.low, self.high))

    @property
    def told(self) -> bool:
        """Whether all cost models agree on whether it is worth it or does harm."""
        return self.low > -WORTH or self.high < WORTH

    @property
    def how(self) -> str:
        """How it is done: what to add to ``vllm serve``, or what else it takes."""
        if self.kind == "memory":
            return "more GPU memory, or less for weights; the cache in fp8 doubles it"
        if "workers" in self.kind:
            return f"{self.what.partition('=')[2]} servers, each request to the least busy"
        if self.kind == "plug-in":
            policy = self.what.partition(":")[0]
            return f"the plug-in of docs/howto/policy.md, with the policy {policy}"

        words = ["vllm serve ..."]
        settings = read_pairs(self.what.split(","), "change")
        # It is no option of the server: clients send it with each request.
        priority = settings.pop("priority", None)
        for name, value in settings.items():
            flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
            negated = flag.replace("--", "--no-", 1)
            words.append({"true": flag, "false": negated}.get(value, f"{flag} {value}"))

        if priority is not None:
            words.append('and in each request of clients "priority": the tokens of its prompt')

        return " ".join(words)


class Trial(NamedTuple):
    """A change to try: as `Change` names it, and what the twin needs for a run with it."""

    what: str
    kind: str
    instance: Instance
    workers: int
    spec: str


class Outcome(NamedTuple):
    """A run of the twin: its metrics, and the sizes of its largest batches.

    `largest_batch`: the most requests, and the most tokens, that a batch of it has; shape (2,).
    """

    metrics: dict[str, Any]
    largest_batch: NDArray[np.int64]


class Tried(NamedTuple):
    """A change that was tried, with its outcome under each cost model, the likeliest first."""

    trial: Trial
    outcomes: list[Outcome]

    def loss(self, of_shares: bool) -> float:
        """Return `loss_of` the outcome under the likeliest model."""
        return loss_of(self.outcomes[0].metrics, of_shares)


def loss_of(metrics: Mapping[str, Any], of_shares: bool) -> float:
    """Return what gains are of: the share of requests that miss their SLOs, or the mean latency.

    `of_shares`: whether it is the first.
    """
    return float(1 - metrics["slo_attainment"] if of_shares else metrics["mean_latency"])


def twin_spec(settings: Mapping[str, str], changed: str = "") -> str:
    """Return the policy with a server's settings, and the ones in ``changed`` in their place.

    `changed`: settings as in a specification, ``name=value,name=value``.
    """
    values = {**settings, **read_pairs(filter(None, changed.split(",")), "change")}
    # vLLM refuses fewer tokens in a batch than requests.
    tokens = max(int(values["max_num_seqs"]), int(values["max_num_batched_tokens"]))
    values["max_num_batched_tokens"] = str(tokens)
    return "vllm-v1:" + ",".join(f"{name}={value}" for name, value in values.items())


def settings_in(spec: str) -> dict[str, str]:
    """Return the settings that a policy's specification names."""
    return parse_spec(spec)[1]


def changes_to_try(instance: Instance, settings: Mapping[str, str], spec: str) -> list[Trial]:
    """Return the changes to try: settings, the plug-in, more memory, and more workers.

    `settings`: as the server is set. `spec`: the twin's policy, which may have further settings.
    """
    max_num_seqs, max_tokens = (int(settings[name]) for name in LIMITS)
    twin_settings = settings_in(spec)
    uncached = twin_settings.get("prefix_caching") == "false"

    # A trial: what is changed, its kind, the instance, the number of workers and the policy.
    words = _changed_settings(max_num_seqs, max_tokens)
    if instance.prefixes is not None:  # the other value than the twin has
        words.append(f"prefix_caching={str(uncached).lower()}")
    trials = [
        Trial(what, "settings", instance, 1, twin_spec(twin_settings, what)) for what in words
    ]

    # The shortest prompt first, which the plug-in serves within the server's own limits. As in
    # `twin_spec`, a batch has no fewer tokens than requests, since vLLM refuses that.
    plug_in = f"spf:max_running={max_num_seqs},max_batch_tokens={max(max_num_seqs, max_tokens)}"
    if uncached:
        plug_in += ",caching=none"
    trials.append(Trial(plug_in, "plug-in", instance, 1, plug_in))

    for factor in (1.5, 2, 4):
        larger = replace(instance, kv_capacity=round(instance.kv_capacity * factor))
        trials.append(Trial(f"kv_capacity={larger.kv_capacity}", "memory", larger, 1, spec))

    # Two workers are a change to begin with. Four and eight are shown, but never come first.
    for kind, count in (("workers", 2), ("further workers", 4), ("further workers", 8)):
        routed = twin_spec(twin_settings, "router=least-requests")
        trials.append(Trial(f"workers={count}", kind, instance, count, routed))

    return trials


def _changed_settings(max_num_seqs: int, max_tokens: int) -> list[str]:
    """Return settings to try around a server's limits of requests and of tokens in a batch.

    No limit of tokens below 64 is tried.
    """
    multiples = {max(64, round(max_tokens * factor)) for factor in (0.125, 0.25, 0.5, 2, 4)}
    small = {size for size in _SMALL if size < max_tokens}  # tried on every server that has more
    budgets = sorted((multiples | small) - {max_tokens})
    counts = (max(1, round(max_num_seqs * factor)) for factor in (0.5, 1.25, 1.5, 2, 4, 8))

    # vLLM has no more requests in a batch than tokens, so either limit may hold the other.
    words = [f"max_num_seqs={count}" for count in counts if count <= max_tokens]
    for size in budgets:
        fewer_requests = f"max_num_seqs={size}," if size < max_num_seqs else ""
        words.append(f"{fewer_requests}max_num_batched_tokens={size}")
    for threshold in sorted({_SMALL[0], max(64, max_tokens // 8)}):
        words.append(f"long_prefill_token_threshold={threshold}")

    return [*words, "prefill_schedule_interval=4", "policy=priority,priority=prompt"]


def first_change(changes: Sequence[Change]) -> Change | None:
    """Return the change to begin with: the cheapest kind that is worth it.

    Settings cost nothing, the plug-in hardly anything, and of hardware memory less than a second
    worker. What counts is the gain under every cost model, or if nothing is worth it under all,
    that under the first. Of one kind the cheapest gains nearly as much as any, and of settings that
    gain the same that with the least mean latency is taken.
    """
    return _first_worth(changes, "low") or _first_worth(changes, "gain")


def _first_worth(changes: Sequence[Change], gain_field: str) -> Change | None:
    """Return the change to begin with of those that are worth it by a field of their gains."""

    def gain_of(change: Change) -> float:
        return float(getattr(change, gain_field))

    def rank(change: Change) -> tuple[int, float, float]:
        # Gains that are equal to a percent are equal here, so that the latency decides.
        rounded = round(gain_of(change), 2)
        return kinds.index(change.kind), -rounded, change.metrics["mean_latency"]

    # From the cheapest kinds on; the first that have anything worth it have the answer.
    for kinds in (("settings",), ("plug-in",), ("memory", "workers")):
        worthy = [one for one in changes if one.kind in kinds and gain_of(one) >= WORTH]
        # Within `kinds`, memory is cheaper than workers and so comes first in `rank`. The first
        # one that gains nearly as much as the best of them (`_PREFERRED`) is taken.
        enough = _PREFERRED * max(map(gain_of, worthy), default=0.0)
        for change in sorted(worthy, key=rank):
            if gain_of(change) >= enough:
                return change

    return None
