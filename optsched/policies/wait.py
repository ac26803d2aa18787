"""Waiting for accumulated inference thresholds: requests begin in groups."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules

GATHER = 4
"""How many requests begin together. The paper has it from rates of arrival that it knows."""
BUFFER = 0.2
"""Share of the KV capacity that is kept free where lengths are not known."""


def _wait(name: str, summary: str, rules: Rules, clairvoyant: bool) -> None:
    """Register a policy of the paper; both take the same parameters."""

    @policy(name, summary, clairvoyant=clairvoyant, paper="Ao et al. 2025, abstract")
    def make(*, gather: int = GATHER, max_running: int | None = None) -> Rules:
        return replace(rules, gather=gather, max_running=max_running)


KNOWN = Rules(admission="reserve")
_wait("wait", "requests begin when enough of like predicted outputs wait", KNOWN, True)
UNKNOWN = Rules(admission="protect", alpha=BUFFER)
_wait("nested-wait", "requests begin when enough wait, beside KV kept free", UNKNOWN, False)
