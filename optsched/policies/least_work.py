"""Least own work first, which lowers total latency once many requests share a batch's costs."""

from __future__ import annotations

from optsched.policies import policy
from optsched.policies.base import Rules


@policy(
    "least-work",
    "least own GPU time first (in rounds: KV volume), while KV fits at every completion",
    clairvoyant=True,
)
def least_work(*, margin: int = 0, max_running: int | None = None) -> Rules:
    """Return rules that admit as `mc-sf` does, but in the order of what requests cost the machine.

    Under load a full machine is close to a single machine on which every request takes its own
    work, and there shortest job first is best. The order of `mc-sf` ignores the prompt, which
    takes a third of the time or more on traces of real use.

    Notes
    -----
    When predictions are too short, KV may overflow. The latest arrivals are then evicted one by
    one until the others fit. To clear all running requests, as `mc-sf` does, would lose more work
    than the machine can make up for.
    """
    return Rules(order="work", margin=margin, admission="lookahead", max_running=max_running)
