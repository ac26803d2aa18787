"""What an instance and a cost model may have for the proofs to hold: the one list of it.

The checker refuses whatever is not listed here. The bounds read the same list
(`optsched.bounds.base`), so that no bound allows for what the checker of its certificate refuses.
"""

from dataclasses import fields
from typing import Any

READ = frozenset({
    "arrival", "prompt_tokens", "output_tokens", "time_unit", "kv_capacity", "kv_accounting",
    "limits", "hybrid_batching", "chunked_prefill",
})  # fmt: skip
"""Fields of an instance that the proofs read."""
LIMITS = frozenset({"max_batch_tokens", "max_prefill_tokens", "max_running"})
"""Limits on batches. They only rule schedules out."""
LESS_ROOM = frozenset({"kv_block_tokens"})
"""Fields that only take room away. Requests that hold whole blocks hold no fewer tokens, so a
schedule that fits with blocks fits without them, and takes the same time. A bound for every
schedule without blocks holds with them."""
PREFIX_FIELDS = frozenset({"prefix_parent", "prefix_tokens", "prefix_block_tokens"})
"""Fields by which schedules may hold and compute less. Only proofs on charges allow for them
(`optsched.bounds.checker.prefixes`)."""
SESSION_FIELDS = frozenset({"after", "delay"})
"""Fields by which requests are released when others end. Only the bounds of
`optsched.bounds.sessions` allow for them."""
DRAFT_FIELDS = frozenset({"num_speculative_tokens", "accepted"})
"""Fields by which decode steps may yield several tokens (`optsched.bounds.checker.drafts`)."""
WINDOW_FIELDS = frozenset({"kv_window"})
"""Fields by which requests hold less than all of their KV (`optsched.bounds.checker.windows`)."""
SILENT = frozenset({
    "predicted", "predicted_lower", "predicted_upper", "forecast", "name", "id", "known", "clients",
    "slo_ttft", "slo_tpot", "slo_gap", "slo_latency", "weight",
})  # fmt: skip
"""Fields that rule no schedule out and change no time. Objectives that depend on SLOs or weights
read them. A certificate of how many are within SLOs states the limits itself."""
COST_TERMS = (
    "token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square",
    "prefill_cross", "prefill_kv", "prefill_token", "prefill_request", "prefill_base",
)  # fmt: skip
"""The terms of a batch's time that the proofs allow for, in milliseconds per layer. A proof may
leave out a term that only adds to batches; it then stands here without being read."""


def further_fields(instance: Any) -> set[str]:
    """Return the fields and limits that proofs must allow for, beyond `READ`.

    A field counts unless it is silent or has its default. So does one of a later version.
    """
    further = set(instance.limits.as_dict())
    for field in fields(instance):
        value = getattr(instance, field.name)
        # Arrays are not compared with a default, which for them is None.
        is_plain = isinstance(value, (bool, int, float, str))
        has_default = value is field.default or (is_plain and value == field.default)
        if not has_default and field.name not in READ | SILENT:
            further.add(field.name)

    return further


def unknown_fields(instance: Any) -> list[str]:
    """Return the fields and limits of an instance that the proofs do not allow for, sorted."""
    return sorted(further_fields(instance) - LIMITS - LESS_ROOM)
