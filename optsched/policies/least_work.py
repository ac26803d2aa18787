"""Least own work first: what minimizes total latency once a batch's fixed cost is shared."""

from __future__ import annotations

from optsched.policies import policy
from optsched.policies.base import Rules


@policy(
    "least-work",
    "least own GPU time first (in rounds: KV volume), while KV fits at every completion",
    clairvoyant=True,
)
def least_work(*, margin: int = 0, max_running: int | None = None) -> Rules:
    """MC-SF's admission, ordered by what a request costs the machine and not by its output.

    With ``margin``, every predicted output counts that many tokens more, as in `mc_sf`.

    Under load a full machine is close to a single one on which requests take their own work, and
    there the shortest job first is best; MC-SF's order forgets the prompt, which on traces of
    real use takes a third of the time and more.

    Notes
    -----
    With predictions that are short KV may overflow; then the latest arrivals are evicted, one by
    one until the others fit. To clear all that runs, as `mc_sf` does, would throw away more than
    the machine can make up for.
    """
    return Rules(
        order="work",
        margin=margin,
        admission="lookahead",
        overflow="evict_latest",
        max_running=max_running,
    )
