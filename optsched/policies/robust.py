"""Policies of Chen, Ye and Zhou (001): outputs known to lie in an interval [l, u].

They read an instance's ``predicted_lower`` and ``predicted_upper``; points stand for both ends,
and without predictions the oracle does. An eviction loses the tokens produced, as in the paper.
In rounds and, with a cost model, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.problem.errors import InputError

ALPHA_STAR = (3 - math.sqrt(5)) / 2
"""l / u below which the bound of `a_l` is the smaller one (001, section 5.1)."""


@policy(
    "a-max",
    "every output is its upper prediction; as many as fit, equals at random",
    clairvoyant=True,
    paper="001, Algorithm 1",
)
def a_max(*, sample: str = "equals") -> Rules:
    """Ascending upper predictions, while KV fits at every predicted completion.

    With ``sample=all`` the order is random among all that wait, not only among equals.

    Notes
    -----
    For one interval both are the same, and Algorithm 1. For several, Algorithm 1 takes as many
    as the largest set that fits, which are those of least upper prediction, but also says that
    they are sampled from all that wait; only that reading gives the paper's second and third
    experiment (`optsched experiment chen-intervals`).

    With equal prompts, as in the paper, that is the largest set that fits: exchanging a request
    for one of smaller estimate never needs more KV. With unequal prompts it is the longest
    prefix of the order. Intervals that hold the truth never overflow; points that are short
    may, and clear the running requests as in `mc_sf`.
    """
    if sample not in ("equals", "all"):
        raise InputError(f"sample: {sample!r}; equals or all is right")
    return Rules(
        order="random" if sample == "all" else "output",
        ties="random",
        lengths="upper",
        admission="lookahead",
        overflow="clear",
        evict_mode="restart",
    )


@policy(
    "a-min",
    "outputs are their lower predictions until they prove longer; least estimate goes first",
    clairvoyant=True,
    paper="001, Algorithms 2 and 5",
)
def a_min(*, make_room: bool = False) -> Rules:
    """Estimates start at the lower predictions, and rise when a request is evicted.

    With ``make_room`` (ours), KV that completions free is kept for waiting requests, and running
    requests past their estimates grow only as others of them are evicted.

    Notes
    -----
    The paper's Lemma 4.4, from which its O(log 1 / alpha) follows, says that of the requests
    with estimate i and output j a share (s + i) / (s + j) completes. In Algorithm 2 freed KV
    first lets running requests grow, so that hardly any is evicted while most outputs are short,
    and long ones stay in the way: the simulated ratio is larger than the lemma's (experiment
    ``chen-distributions``). ``make_room`` behaves as the lemma has it, at the price of more
    evictions.

    The paper sets an evicted request's estimate to the tokens that it had produced. One evicted
    before it reached its estimate keeps the estimate here: it is still a lower bound, and the
    better one.
    """
    return Rules(
        order="output",
        ties="random",
        lengths="lower",
        admission="lookahead",
        overflow="evict_shortest",
        make_room=make_room,
        evict_mode="restart",
    )


@policy(
    "a-l",
    "a request longer than its lower prediction starts again, last, at its upper one",
    clairvoyant=True,
    paper="001, Algorithm 6",
)
def a_l() -> Rules:
    """For outputs that are either l or u; any others in [l, u] are served as if they were u."""
    return Rules(
        order="output",
        ties="random",
        lengths="lower",
        admission="lookahead",
        overflow="evict_shortest",
        promote=True,
        evict_mode="restart",
    )


@policy(
    "a-switch",
    "a-l where l / u is below (3 - sqrt 5) / 2, else a-min",
    clairvoyant=True,
    paper="001, section 5.1",
)
def a_switch() -> Rules:
    """The smaller of the two bounds; l and u are the ends of the intervals' hull."""
    return replace(a_min(), wide=a_l(), wide_below=ALPHA_STAR)


@policy(
    "h-sf",
    "shortest true output first, while KV fits at every completion",
    clairvoyant=True,
    paper="001, Algorithm 3",
)
def h_sf() -> Rules:
    """MC-SF in hindsight: it looks through intervals at the truth, but not through points.

    Notes
    -----
    The paper takes the largest set that fits; see `a_max`.
    """
    return Rules(
        order="output",
        lengths="hindsight",
        admission="lookahead",
        overflow="clear",
        evict_mode="restart",
    )


@policy(
    "a-random",
    "random order with true outputs, while KV fits at every completion",
    clairvoyant=True,
    paper="001, Algorithm 4",
)
def a_random() -> Rules:
    """As `h_sf` in the order of a random permutation."""
    return Rules(
        order="random",
        ties="random",
        lengths="hindsight",
        admission="lookahead",
        overflow="clear",
        evict_mode="restart",
    )
