"""Decodes that wait for their deadlines, so that short prompts are prefilled sooner."""

from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.deadlines import CHUNKS, TOKENS


@policy(
    "slai",
    "shortest prompt first; decodes wait for prefills until their next token is nearly due",
    paper="Bari, Hegde and de Veciana 2025, abstract",
)
def slai(
    *, hold: float = 1.0, max_batch_tokens: int = TOKENS, max_running: int | None = None
) -> Rules:
    """Return rules by which only decodes that are nearly late go before prefills.

    `hold`: a decode is nearly late within so many limits on TPOT of its deadline, >= 1. It needs
    SLOs on TPOT (docs/policies/discussed.md).
    """
    made = replace(CHUNKS, order="prompt", paced=True, hold=hold, max_running=max_running)
    return replace(made, max_batch_tokens=max_batch_tokens)
