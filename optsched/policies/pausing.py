"""Shortest remaining prefill first, where long prefills pause while others decode."""

from __future__ import annotations

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules

SPF = Rules(order="prompt", groups=("running_decode", "prefill"), chunked=True)
GATE, PIECE, TOKENS = 1.0, 512.0, 8192


def _pausing(
    rules: Rules, gate: float, piece: float, tokens: int | None, max_running: int | None
) -> Rules:
    return replace(rules, gate=gate, piece=piece, max_batch_tokens=tokens, max_running=max_running)


@policy("spf", "shortest remaining prefill first, and long ones pause while others decode")
def spf(
    *,
    gate: float = GATE,
    piece: float = PIECE,
    max_batch_tokens: int = TOKENS,
    max_running: int | None = None,
) -> Rules:
    """Return rules that keep both short prompts and decodes from waiting behind a long prefill."""
    return _pausing(SPF, gate, piece, max_batch_tokens, max_running)


@policy(
    "spf-work",
    "least remaining work first, and long prefills pause while others decode",
    clairvoyant=True,
)
def spf_work(
    *,
    gate: float = GATE,
    piece: float = PIECE,
    max_batch_tokens: int = TOKENS,
    max_running: int | None = None,
) -> Rules:
    """Return the rules of `spf` with the predicted decodes counted in what is left."""
    return _pausing(
        replace(SPF, order="work", admission="lookahead"),
        gate,
        piece,
        max_batch_tokens,
        max_running,
    )
