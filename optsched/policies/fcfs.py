"""The plain baseline: first come, first served."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.memory_constrained import CAREFUL


@policy("fcfs", "first come first served, hybrid batches, evicting the latest arrival")
def fcfs(*, max_running: int | None = None) -> Rules:
    """Return rules that admit by arrival while the prompt fits beside the KV that is held now.

    In rounds an eviction loses all progress, so admission looks ahead there, as `mc-benchmark`
    does.
    """
    return Rules(max_running=max_running, in_rounds=replace(CAREFUL, max_running=max_running))
