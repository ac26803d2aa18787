"""Algorithm 1 of Chen, Ye and Zhou 2025; ``table.toml`` has the other policies of the paper."""

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.table import rules_like
from optsched.problem.errors import InputError


@policy(
    "a-max",
    "every output is taken as its upper prediction; as many as fit, equals at random",
    clairvoyant=True,
    paper="Chen, Ye and Zhou 2025, Algorithm 1",
)
def a_max(*, sample: str = "equals") -> Rules:
    """Return rules that admit by upper prediction while KV fits at every predicted completion.

    `sample` says whether the order is random among requests of equal upper prediction only, or
    among all that wait: the paper can be read in both ways (docs/policies/intervals.md). With equal
    prompts, as in the paper, the rules take the largest set that fits: to exchange a request for
    one of smaller estimate never needs more KV. With unequal ones they take the longest prefix of
    the order.
    """
    if sample not in ("equals", "all"):
        raise InputError(f"sample: found {sample!r}; expected equals or all")

    order = "random" if sample == "all" else "output"
    return rules_like("mc-sf", order=order, ties="random", lengths="upper")
