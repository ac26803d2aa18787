"""Decode steps that yield several tokens, for proofs about steps that yield one.

Take an instance with drafts (`optsched.problem.drafts`), and the same without, in which a request
has as many output tokens o' as there are runs in its output: the first token, and the fewest decode
steps that may yield the others. With the column these are the recorded ones, and otherwise every
step is granted all of its drafts.

*Every schedule S of the first is one, S', of the second in which no first token and no last token
is later.* What a step yields ends with a run at the latest. So from any place in a run p tokens
lead to a place at most one run further, and o tokens take o' batches that yield some, the last
evicted run of a restart aside. S' has the batches and evictions of S. In each that yields tokens of
a request in S it yields one in S', as long as it has not ended, so that it ends there no later. S'
then never has more tokens of a request cached or to be computed than S. A decode of S' processes
one token, at most those of S. A prefill that S splits is split where S does, or earlier where the
input of S' ends, which keeps its last token for S' to process in S's last part. Each batch of S'
thus has no more requests, tokens, and KV of each phase than that of S. It keeps the limits. Under
a linear model, whose coefficients are not negative, it takes no longer, and batches that have
become empty are left out. By induction none starts later than in S.

So what bounds S' from below bounds S in every objective that grows with first tokens and ends and
depends on nothing else, for given releases. Where these follow from ends, it bounds what counts
from first arrivals. Nothing is claimed of tables, by which a batch of fewer tokens may take longer
(under their minorants the proof holds), of pools, of TPOT and of gaps.
"""

from dataclasses import replace
from typing import Any

from optsched.bounds.checker.fields import DRAFT_FIELDS, SESSION_FIELDS, further_fields
from optsched.bounds.checker.parts import Budget, expect

OBJECTIVES = frozenset({
    "tel", "weighted_latency", "weighted_completion", "makespan", "mean_ttft", "p50_latency",
    "p90_latency", "p99_latency", "p50_ttft", "p90_ttft", "p99_ttft",
})  # fmt: skip
"""The objectives that depend on first tokens and ends alone, and grow with each."""
OF_SESSIONS = frozenset({
    "session_completion", "mean_session_completion", "p50_session_completion",
    "p90_session_completion", "p99_session_completion", "makespan",
})  # fmt: skip
"""The same where releases depend on ends, so that a latency may grow if another request ends."""


def covers(instance: Any, objective: str) -> bool:
    """Whether what bounds an objective without drafts bounds it with them."""
    sessions = further_fields(instance) & SESSION_FIELDS
    return objective in (OF_SESSIONS if sessions else OBJECTIVES)


def fewest_outputs(instance: Any) -> list[int]:
    """Return by request 1 for the first token plus the fewest decodes that may yield the others."""
    output = instance.output_tokens.tolist()
    tokens_per_decode = 1 + int(instance.num_speculative_tokens)
    if instance.accepted is None:
        return [1 + -(-(o - 1) // tokens_per_decode) for o in output]

    outputs = []
    for o, accepted in zip(output, instance.accepted, strict=True):
        remaining, runs = o - 1, 1
        # Each recorded step yields its accepted drafts and one token more. Steps that are recorded
        # beyond the output do not count.
        for drafts in accepted:
            if remaining <= 0:
                break

            remaining -= 1 + int(drafts)
            runs += 1

        outputs.append(runs)

    return outputs


def without_drafts(instance: Any) -> Any:
    """Return the instance whose bounds hold for one with drafts."""
    return replace(
        instance.without_predictions(),
        output_tokens=fewest_outputs(instance),
        num_speculative_tokens=None,
        accepted=None,
        known=None,
    )


def proved_about(instance: Any, certificate: dict[str, Any], budget: Budget) -> Any:
    """Return the instance that the tree of a certificate must be about: one without drafts."""
    if not further_fields(instance) & DRAFT_FIELDS:
        return instance

    budget.spend(sum(instance.output_tokens.tolist()))
    is_linear = "table" not in (certificate.get("cost_model") or {})
    covered = covers(instance, certificate["objective"])
    proved = covered and is_linear and "pools" not in certificate
    what = "an objective of ends and first tokens alone under a linear model, without pools"
    expect(proved, f"instance: found num_speculative_tokens; expected none, or {what}")
    # An optimum without drafts is a bound with them, and its schedule is one of the other instance.
    expect(certificate.get("claim") != "optimal", "claim: found 'optimal'; expected 'bound'")
    return without_drafts(instance)
