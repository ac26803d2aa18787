"""Least own work first, which lowers total latency once many requests share a batch's costs."""

from optsched.policies import policy
from optsched.policies.base import Rules


@policy(
    "least-work",
    "least own GPU time first (in rounds: KV volume), while KV fits at every completion",
    clairvoyant=True,
)
def least_work(*, margin: int = 0, max_running: int | None = None) -> Rules:
    """Return rules that admit as `mc-sf` does, but in the order of what requests cost the machine.

    docs/policies/least-work.md says why. Where KV overflows, the latest arrivals are evicted one by
    one. To clear all that runs, as `mc-sf` does, would lose more than the machine can make up for.
    """
    return Rules(order="work", margin=margin, admission="lookahead", max_running=max_running)
