"""Policies of Chen, Ye and Zhou 2025: every output is known to lie in an interval [l, u].

They read an instance's ``predicted_lower`` and ``predicted_upper``. A predicted length stands for
both ends, and so does the true length where nothing is predicted. An eviction loses the tokens
produced, as in the paper. The policies run in rounds and, with a cost model, in seconds.
"""

from __future__ import annotations

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

    `sample`: whether the order is random among requests of equal upper prediction only, or among
    all that wait.

    Notes
    -----
    When all requests have the same interval, both samples are Algorithm 1. When there are several
    intervals, the paper can be read in two ways. Algorithm 1 takes as many requests as the
    largest set that fits, which are those of smallest upper prediction. It also says that they are
    sampled from all that wait. Only the second reading gives the paper's second and third
    experiments (`optsched experiment chen-intervals`).

    With equal prompts, as in the paper, the rules take the largest set that fits: to exchange a
    request for one of smaller estimate never needs more KV. With unequal prompts they take the
    longest prefix of the order. Intervals that contain the true output never cause an overflow.
    Predicted lengths that are too short may, and then the running requests are cleared as for
    `mc-sf`.
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

    `make_room`: whether KV that completions free is kept for waiting requests. Running requests
    past their estimates then grow only as others of them are evicted. This is ours.

    Notes
    -----
    The ratio O(log 1 / alpha) of the paper follows from its Lemma 4.4. The lemma says that of the
    requests with estimate i and output j a share (s + i) / (s + j) completes. In Algorithm 2
    freed KV first lets running requests grow. Hardly any request is then evicted while most
    outputs are short, and long ones stay in the way. The simulated ratio is therefore larger than
    the lemma's (experiment ``chen-distributions``). With ``make_room`` the rules behave as the
    lemma says, at the price of more evictions.

    The paper sets an evicted request's estimate to the tokens that it had produced. Here a
    request that is evicted before it reached its estimate keeps the estimate, which is still a
    lower bound and the larger one.
    """
    return replace(SHORTEST, make_room=make_room)


@chen(
    "a-l",
    "a request longer than its lower prediction starts again, last, at its upper one",
    "Algorithm 6",
)
def a_l() -> Rules:
    """Return rules for outputs that are either l or u.

    A request that outlives its lower prediction restarts behind all others with its upper one.
    Other outputs in [l, u] are allowed, and are then served as if they were u.
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
    """Return the rules of MC-SF in hindsight.

    They use the true output where an interval is predicted. Where a single length is predicted,
    they use that.

    Notes
    -----
    The paper takes the largest set that fits; see `a-max`.
    """
    return replace(CAREFUL, order="output", lengths="hindsight")


@chen(
    "a-random", "random order with true outputs, while KV fits at every completion", "Algorithm 4"
)
def a_random() -> Rules:
    """Return the rules of `h-sf` in the order of a random permutation."""
    return replace(CAREFUL, order="random", ties="random", lengths="hindsight")
