"""Smallest volume first, of Kong, Qi, Ye and Zhou 2026."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.memory_constrained import CAREFUL


@policy(
    "smallest-volume",
    "smallest predicted KV volume first, while KV fits at every completion",
    clairvoyant=True,
    paper="Kong, Qi, Ye and Zhou 2026, abstract",
)
def smallest_volume(*, margin: int = 0, max_running: int | None = None) -> Rules:
    """Return rules that take waiting requests by the KV token-rounds that they will hold.

    docs/policies/smallest-volume.md says what is the paper's and what ours.
    """
    return replace(CAREFUL, order="volume", margin=margin, max_running=max_running)
