"""Shortest remaining prefill first, where long prefills pause while others decode."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules

GATE = 1.0
"""What `Rules.gate` balances. Half of it is better where lengths are not known."""
PIECE = 512.0
"""A batch with prefills takes at most the time of so many decode steps."""
TOKENS = 8192
SPARE = 0.1
"""Share of the KV capacity that is kept for outputs whose lengths are not known."""

SPF = Rules(order="prompt", groups=("running_decode", "prefill"), chunked=True)
BY_WORK = replace(SPF, order="work", admission="lookahead")


def _pausing(
    name: str, summary: str, rules: Rules, usual: float = GATE, clairvoyant: bool = True
) -> None:
    """Register a policy that pauses prefills; all take the same parameters."""

    @policy(name, summary, clairvoyant=clairvoyant)
    def make(
        *,
        gate: float = usual,
        piece: float = PIECE,
        cheap: bool = False,
        max_batch_tokens: int | None = TOKENS,
        max_running: int | None = None,
    ) -> Rules:
        made = replace(rules, gate=gate, piece=piece, cheap=cheap)
        return replace(made, max_batch_tokens=max_batch_tokens, max_running=max_running)


_pausing(
    "spf", "shortest remaining prefill first; long ones pause for decodes", SPF, GATE / 2, False
)
_pausing("spf-work", "least remaining work first; long prefills pause for decodes", BY_WORK)
PATIENT = replace(SPF, patient=True, admission="protect", alpha=SPARE)
_pausing(
    "patient",
    "as spf, and prefills wait for decodes that end soon, and for each other",
    PATIENT,
    clairvoyant=False,
)
_pausing(
    "patient-work",
    "as spf-work, and prefills wait for decodes that end soon, and for each other",
    replace(BY_WORK, patient=True),
)
