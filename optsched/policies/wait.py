"""Waiting for accumulated inference thresholds: requests begin in groups."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules

GATHER = 4
"""How many requests begin together. The paper has it from rates of arrival that it knows."""
WAIT = Rules(groups=("running", "waiting"))


@policy(
    "wait",
    "requests begin when enough wait whose predicted outputs are alike; no evictions",
    clairvoyant=True,
    paper="Ao et al. 2025, abstract",
)
def wait(*, gather: int = GATHER, max_running: int | None = None) -> Rules:
    """Return rules with a threshold for each group of outputs (docs/policies/discussed.md)."""
    made = replace(WAIT, gather=gather, gather_by="output", admission="reserve")
    return replace(made, max_running=max_running)


@policy(
    "nested-wait",
    "requests begin when enough wait, beside KV that is kept free for long outputs",
    paper="Ao et al. 2025, abstract",
)
def nested_wait(
    *, gather: int = GATHER, alpha: float = 0.2, max_running: int | None = None
) -> Rules:
    """Return rules with one threshold, for outputs of unknown lengths.

    `alpha`: the share of the KV capacity that is the safety buffer, 0 <= alpha < 1.
    """
    made = replace(WAIT, gather=gather, admission="protect", alpha=alpha)
    return replace(made, max_running=max_running)
