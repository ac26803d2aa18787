"""Policies of Jaillet et al. (002): MC-SF, MC-Benchmark, alpha-protection, beta-clearing."""

from __future__ import annotations

from optsched.policies import policy
from optsched.policies.base import Rules


@policy(
    "mc-sf",
    "shortest predicted output first, while KV fits at every completion",
    clairvoyant=True,
    paper="002, Algorithm 1",
)
def mc_sf(*, margin: int = 0) -> Rules:
    """Running requests go on; shortest first; stop at the first that does not fit.

    With ``margin``, every predicted output counts that many tokens more (002, section 6).

    Notes
    -----
    With predictions that are short, KV may overflow; running requests are then cleared, as in
    `alpha_protection`, and their estimates raised to what they had produced.
    """
    return Rules(
        order="output",
        margin=margin,
        admission="lookahead",
        overflow="clear",
        evict_mode="restart",
    )


@policy(
    "mc-benchmark",
    "first come first served, while KV fits at every completion",
    clairvoyant=True,
    paper="002, Algorithm 2",
)
def mc_benchmark() -> Rules:
    """As MC-SF in ascending arrival."""
    return Rules(order="arrival", admission="lookahead", overflow="clear", evict_mode="restart")


@policy(
    "alpha-protection",
    "first come first served within (1 - alpha) of the KV; all cleared at overflow",
    paper="002, section 5.2",
)
def alpha_protection(*, alpha: float = 0.25) -> Rules:
    """At overflow every running request is cleared back to the queue, unprocessed."""
    return Rules(admission="protect", alpha=alpha, overflow="clear", evict_mode="restart")


@policy(
    "alpha-beta",
    "as alpha-protection, but each running request is cleared with probability beta",
    paper="002, section 5.2",
)
def alpha_beta(*, alpha: float = 0.2, beta: float = 0.1) -> Rules:
    """One draw per batch time while KV still overflows."""
    return Rules(
        admission="protect", alpha=alpha, overflow="clear", beta=beta, evict_mode="restart"
    )
