"""Policies of Chen, Ye and Zhou 2025: every output is known to lie in an interval [l, u].

They read an instance's ``predicted_lower`` and ``predicted_upper``. A predicted length stands for
both ends, and so does the true length where nothing is predicted. An eviction loses the tokens
produced, as in the paper. The policies run in rounds and, with a cost model, in seconds.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from optsched.policies import Make, policy
from optsched.policies.base import Order, Rules
from optsched.policies.memory_constrained import CAREFUL
from optsched.problem.errors import InputError

ALPHA_STAR = (3 - math.sqrt(5)) / 2
"""Value of l / u below which `a_l` has the smaller bound (Chen, Ye and Zhou 2025, section 5.1)."""

SHORTEST = Rules(
    order="output",
    ties="random",
    lengths="lower",
    admission="lookahead",
    overflow="evict_shortest",
    evict_mode="restart",
)
"""The smallest estimate is admitted first, and evicted first."""


def chen(name: str, summary: str, place: str) -> Callable[[Make], Make]:
    """Register a policy of the paper, whose lengths are known."""
    return policy(name, summary, clairvoyant=True, paper=f"Chen, Ye and Zhou 2025, {place}")


@chen(
    "a-max",
    "every output is taken as its upper prediction; as many as fit, equals at random",
    "Algorithm 1",
)
def a_max(*, sample: str = "equals") -> Rules:
    """Return rules that admit by upper prediction while KV fits at every predicted completion.

    `sample` says whether the order is random among requests of equal upper prediction only, or
    among all that wait: the paper can be read in both ways (docs/policies/a-max.md). With equal
    prompts, as in the paper, the rules take the largest set that fits: to exchange a request for
    one of smaller estimate never needs more KV. With unequal ones they take the longest prefix of
    the order.
    """
    if sample not in ("equals", "all"):
        raise InputError(f"sample: found {sample!r}; expected equals or all")

    order: Order = "random" if sample == "all" else "output"
    return replace(CAREFUL, order=order, ties="random", lengths="upper")


@chen(
    "a-min",
    "outputs are their lower predictions until they prove longer; smallest estimate goes first",
    "Algorithms 2 and 5",
)
def a_min(*, make_room: bool = False) -> Rules:
    """Return rules whose estimates start at the lower predictions and rise with evictions.

    docs/policies/a-min.md says what `make_room`, which is ours, is for. The paper sets an evicted
    request's estimate to the tokens that it had produced. Here a request that is evicted before it
    reached its estimate keeps the estimate, which is still a lower bound and the larger one.
    """
    return replace(SHORTEST, make_room=make_room)


@chen(
    "a-l",
    "a request longer than its lower prediction starts again, last, at its upper one",
    "Algorithm 6",
)
def a_l() -> Rules:
    """Return rules for outputs that are either l or u; others are served as if they were u.

    A request that outlives its lower prediction restarts behind all others with its upper one.
    """
    return replace(SHORTEST, promote=True)


@chen("a-switch", "a-l where l / u is below (3 - sqrt 5) / 2, else a-min", "section 5.1")
def a_switch() -> Rules:
    """Return rules that switch between `a-l` and `a-min`, whichever has the smaller bound.

    Here l is the smallest lower prediction and u the largest upper prediction.
    """
    return replace(a_min(), wide=a_l(), wide_below=ALPHA_STAR)


@chen("h-sf", "shortest true output first, while KV fits at every completion", "Algorithm 3")
def h_sf() -> Rules:
    """Return the rules of MC-SF in hindsight: with the true output instead of an interval."""
    return replace(CAREFUL, order="output", lengths="hindsight")


@chen(
    "a-random", "random order with true outputs, while KV fits at every completion", "Algorithm 4"
)
def a_random() -> Rules:
    """Return the rules of `h-sf` in the order of a random permutation."""
    return replace(CAREFUL, order="random", ties="random", lengths="hindsight")
