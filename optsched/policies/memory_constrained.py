"""Policies of Jaillet et al. 2025: MC-SF, MC-Benchmark, alpha-protection and beta-clearing."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules

CAREFUL = Rules(admission="lookahead", overflow="clear", evict_mode="restart")
"""First come first served while KV fits at every predicted completion; all cleared at overflow."""

CLEARING = Rules(admission="protect", overflow="clear", evict_mode="restart")


@policy(
    "mc-sf",
    "shortest predicted output first, while KV fits at every completion",
    clairvoyant=True,
    paper="Jaillet et al. 2025, Algorithm 1",
)
def mc_sf(*, margin: int = 0) -> Rules:
    """Return the rules of MC-SF, shortest predicted output first (docs/policies/mc-sf.md)."""
    return replace(CAREFUL, order="output", margin=margin)


@policy(
    "mc-benchmark",
    "first come first served, while KV fits at every completion",
    clairvoyant=True,
    paper="Jaillet et al. 2025, Algorithm 2",
)
def mc_benchmark() -> Rules:
    """Return the rules of MC-SF in the order of arrival."""
    return CAREFUL


@policy(
    "alpha-protection",
    "first come first served within (1 - alpha) of the KV; all cleared at overflow",
    paper="Jaillet et al. 2025, section 5.2",
)
def alpha_protection(*, alpha: float = 0.25) -> Rules:
    """Return rules that clear every running request, with all progress, when KV overflows.

    `alpha`: the share of the KV capacity that admission keeps free, 0 <= alpha < 1.
    """
    return replace(CLEARING, alpha=alpha)


@policy(
    "alpha-beta",
    "as alpha-protection, but each running request is cleared with probability beta",
    paper="Jaillet et al. 2025, section 5.2",
)
def alpha_beta(*, alpha: float = 0.2, beta: float = 0.1) -> Rules:
    """Return rules that clear each running request with a probability while KV overflows.

    There is one draw per batch time. `alpha` is as for `alpha_protection`.
    """
    return replace(CLEARING, alpha=alpha, beta=beta)
