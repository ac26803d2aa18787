"""Shortest remaining prefill first, where long prefills pause while others decode."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.rules import Caching, Rules

GATE = 1.0
"""What `Rules.gate` balances. Half of it is better where lengths are not known."""
PIECE = 512.0
"""A batch with prefills takes at most the time of so many decode steps."""
TOKENS = 8192
SPARE = 0.1
"""Share of the KV capacity that is kept for outputs whose lengths are not known."""

SPF = Rules(order="prompt", groups=("running_decode", "prefill"), caching="lru", chunked=True)
BY_WORK = replace(SPF, order="work", admission="lookahead", caching="next-use")


def _pausing(name: str, summary: str, rules: Rules, own: float = GATE, known: bool = True) -> None:
    """Register a policy that pauses prefills; all take the same parameters."""

    @policy(name, summary, clairvoyant=known)
    def make(
        *,
        gate: float = own,
        piece: float = PIECE,
        cheap: bool = False,
        caching: Caching = rules.caching,
        max_batch_tokens: int | None = TOKENS,
        max_running: int | None = None,
    ) -> Rules:
        made = replace(rules, gate=gate, piece=piece, cheap=cheap, caching=caching)
        return replace(made, max_batch_tokens=max_batch_tokens, max_running=max_running)


PATIENT = replace(SPF, patient=True, admission="protect", alpha=SPARE)
_pausing("spf", "shortest remaining prefill first; long ones pause for decodes", SPF, 0.5, False)
_pausing("spf-work", "least remaining work first; long prefills pause for decodes", BY_WORK)
SOON = "and prefills wait for decodes that end soon, and for each other"
_pausing("patient", f"as spf, {SOON}", PATIENT, known=False)
_pausing("patient-work", f"as spf-work, {SOON}", replace(BY_WORK, patient=True))
