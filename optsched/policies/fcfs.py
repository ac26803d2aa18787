"""The plain baseline: first come, first served."""

from __future__ import annotations

from optsched.policies import policy
from optsched.policies.base import Rules


@policy("fcfs", "first come first served, hybrid batches, evicting the latest arrival")
def fcfs(*, max_running: int | None = None) -> Rules:
    """Admit in order of arrival when the prompt fits beside the KV that is held now.

    In rounds, where an eviction loses all progress, admission looks ahead as MC-Benchmark's.
    """
    careful = Rules(
        admission="lookahead", overflow="clear", evict_mode="restart", max_running=max_running
    )
    return Rules(max_running=max_running, in_rounds=careful)
