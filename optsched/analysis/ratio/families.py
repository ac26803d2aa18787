"""Adversarial families of instances from the papers, in rounds."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from optsched.policies import Scheduler
from optsched.policies.run import run
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError, LoopError
from optsched.problem.instance import Instance

Family = Callable[[str | Scheduler, int, int, Generator], Instance]


def against(policy: str | Scheduler, kv_capacity: int, *, seed: int = 0) -> Instance:
    """Return the instance of M / 2 + 1 requests that an adversary builds against a policy.

    This is the adversary of Jaillet et al. 2025, Theorem 4.1. One request with s = 1 and o = M - 1
    arrives at 0. The adversary sees in which round b the policy starts it. It then sends M / 2
    requests with s = 1 and o = 1 in round b + M - sqrt(M) / 2. At that time the long request holds
    all but about sqrt(M) / 2 tokens and keeps them for about as many rounds. Until then the policy
    sees only the long request, so that it starts it in round b of this instance too.

    Parameters
    ----------
    policy : str, Rules, Windows or Policy
        A deterministic policy. Against a random one the adversary answers the run of ``seed``.
    kv_capacity : int
        M, at least 4 tokens.
    seed : int

    Raises
    ------
    InputError
        The KV capacity is below 4.
    LoopError
        The policy never starts the long request.

    Notes
    -----
    The second arrival is rounded down to whole rounds. Where M is not an even square this is not
    worse than the paper's.
    """
    check_whole(kv_capacity, "kv_capacity", 4)
    start = _start_of_long(policy, kv_capacity, seed)
    short = kv_capacity // 2
    release = start + kv_capacity - math.isqrt(kv_capacity) // 2
    return _of_columns(
        [0] + [release] * short,
        [1] * (short + 1),
        [kv_capacity - 1] + [1] * short,
        kv_capacity=kv_capacity,
        name=f"theorem-4.1-m{kv_capacity}",
    )


def _of_columns(*columns: Sequence[int], kv_capacity: int, name: str = "") -> Instance:
    """Return an instance in rounds of arrivals, prompts and outputs, in this order."""
    arrival, prompt, output = (np.array(column) for column in columns)
    return Instance(arrival, prompt, output, kv_capacity=kv_capacity, name=name)


def _start_of_long(policy: str | Scheduler, kv_capacity: int, seed: int) -> int:
    """Return the round in which a policy starts a single request with s = 1 and o = M - 1."""
    alone = _of_columns([0], [1], [kv_capacity - 1], kv_capacity=kv_capacity)
    return int(run(alone, policy, seed=seed).evaluation.finish[0]) - (kv_capacity - 1)


def from_shares(
    shares: ArrayLike,
    n: int,
    *,
    kv_capacity: int,
    first: int = 1,
    rng: Generator | None = None,
    name: str = "",
) -> Instance:
    """Return requests at 0 in rounds, each with one prompt token, whose outputs have given shares.

    They stand in the order of their outputs.

    `shares`: shares of the lengths ``first``, ``first + 1``, ... They need not sum to 1.
    `first`: the smallest output length. Every request is predicted between it and the largest
    length.
    `rng`: with a generator the outputs are drawn. Without one their numbers are in proportion to
    the shares, rounded by largest remainders.
    """
    x = np.asarray(shares, dtype=np.float64)
    x = x / x.sum()
    last = first + len(x) - 1

    if rng is not None:
        counts = rng.multinomial(n, x)
    else:
        # Rounded down, some of n are missing: the lengths with the largest remainders have them.
        counts = np.floor(x * n).astype(np.int64)
        by_remainder = np.argsort(counts - x * n, kind="stable")
        counts[by_remainder[: n - counts.sum()]] += 1

    output = np.repeat(np.arange(first, last + 1), counts)
    return Instance(
        arrival=np.zeros(n, dtype=np.int64),
        prompt_tokens=np.ones(n, dtype=np.int64),
        output_tokens=output,
        kv_capacity=kv_capacity,
        predicted_lower=np.full(n, first),
        predicted_upper=np.full(n, last),
        name=name,
    )


def two_point(short: int, long: int, share: float, n: int, *, kv_capacity: int) -> Instance:
    """Return requests at 0 with one of two outputs (Chen, Ye and Zhou 2025, section 5.1).

    Parameters
    ----------
    short, long : int
        The two outputs l < u, in tokens.
    share : float
        Share of requests with the short output, in [0, 1].
    n : int
        Number of requests.
    kv_capacity : int
        M, in tokens.
    """
    if not (1 <= short < long and 0 <= share <= 1):
        raise InputError(
            f"short, long, share: found {short}, {long}, {share}; expected 1 <= short < long and "
            "a share in [0, 1]"
        )

    x, name = np.zeros(long - short + 1), f"two-point-{short}-{long}"
    x[0], x[-1] = share, 1 - share
    return from_shares(x, n, kv_capacity=kv_capacity, first=short, name=name)


def geometric_shares(q: float, u: int) -> NDArray[np.float64]:
    """Return P(o = k) of G(1 - q), up to a factor, for k = 1, ..., u (Chen et al., section 5.2)."""
    if not 0 <= q <= 1:
        raise InputError(f"q: found {q!r}; expected 0 <= q <= 1")

    return np.asarray(q ** np.arange(u, dtype=np.float64))


def geometric(
    q: float, n: int, *, kv_capacity: int, longest: int, rng: Generator | None = None
) -> Instance:
    """Return requests at 0 with geometric outputs (Chen, Ye and Zhou 2025, section 5.2).

    Parameters
    ----------
    q : float
        Outputs follow G(1 - q): each length is q times as frequent as the one before.
    n : int
        Number of requests.
    kv_capacity, rng
        M, in tokens; with a generator the outputs are drawn, else their numbers are in proportion.
    longest : int
        The largest output, in tokens. The distribution is cut there.
    """
    shares, name = geometric_shares(q, longest), f"geometric-{q:g}"
    return from_shares(shares, n, kv_capacity=kv_capacity, rng=rng, name=name)


def weighted_geometric_shares(q: float, u: int) -> NDArray[np.float64]:
    """Return k q^(k - 1), P(o = k) of LG(1 - q) up to a factor, for k = 1, ..., u (section 5.3)."""
    return np.arange(1, u + 1) * geometric_shares(q, u)


def weighted_geometric(
    q: float, n: int, *, kv_capacity: int, longest: int, rng: Generator | None = None
) -> Instance:
    """Return requests at 0 with weighted geometric outputs (Chen, Ye and Zhou 2025, section 5.3).

    Parameters
    ----------
    q : float
        Outputs follow LG(1 - q): the share of length k is in proportion to k q^(k - 1).
    n : int
        Number of requests.
    kv_capacity, rng
        M, in tokens; with a generator the outputs are drawn, else their numbers are in proportion.
    longest : int
        The largest output, in tokens. The distribution is cut there.
    """
    shares, name = weighted_geometric_shares(q, longest), f"weighted-{q:g}"
    return from_shares(shares, n, kv_capacity=kv_capacity, rng=rng, name=name)


def blocked_shorts(policy: str | Scheduler, kv_capacity: int, n: int, seed: int) -> Instance:
    """Return a long request, then short ones that do not fit with it: `against` with few requests.

    After the policy has started the long request, or from round 1 on if it never does, one short
    request with a prompt of M - 1 tokens arrives in each round. It would have been best to start
    the long one a few rounds later.
    """
    long = kv_capacity - 1
    start = 0
    with suppress(LoopError):
        start = _start_of_long(policy, kv_capacity, seed)

    return _of_columns(
        [0, *range(start + 1, start + n)],
        [1] + [long] * (n - 1),
        [long] + [1] * (n - 1),
        kv_capacity=kv_capacity,
        name=f"blocked-m{kv_capacity}-n{n}",
    )


def wide_first(kv_capacity: int, n: int, wide: int) -> Instance:
    """Return requests at 0: wide ones, and narrow ones whose outputs are one token longer.

    A policy that serves the shortest output first serves the wide requests of output a one after
    the other. The narrow ones, at least one, have output a + 1 and prompt 1, and fit together.

    The M tokens of a wide request, M - a and a, leave none for another. A narrow one has a + 2 of
    them, of which a is chosen as large as fits for all narrow ones.
    """
    narrow = max(1, n - wide)
    a = max(1, kv_capacity // narrow - 2)
    return _of_columns(
        [0] * (wide + narrow),
        [kv_capacity - a] * wide + [1] * narrow,
        [a] * wide + [a + 1] * narrow,
        kv_capacity=kv_capacity,
        name=f"wide-first-m{kv_capacity}-n{wide + narrow}",
    )


def _draw_adaptive(policy: str | Scheduler, kv_capacity: int, n: int, rng: Generator) -> Instance:
    """Draw which of two adversaries answers the policy."""
    seed = int(rng.integers(2**31))
    if rng.random() < 0.5:
        return blocked_shorts(policy, kv_capacity, n, seed)

    # The adversary sends M / 2 + 1 requests, so that M has to be small for n of them.
    return against(policy, max(4, min(kv_capacity, 2 * (n - 1))), seed=seed)


def _draw_two_point(_: object, kv_capacity: int, n: int, rng: Generator) -> Instance:
    long = int(rng.integers(2, max(3, kv_capacity // 2)))
    short = int(rng.integers(1, long))
    return two_point(short, long, float(rng.random()), n, kv_capacity=kv_capacity)


def _family_of(make: Callable[..., Instance]) -> Family:
    """Return the family that `geometric` or `weighted_geometric` makes of any q."""

    def draw(_: object, kv_capacity: int, n: int, rng: Generator) -> Instance:
        q, longest = float(rng.random()), kv_capacity // 2
        return make(q, n, kv_capacity=kv_capacity, longest=longest, rng=rng)

    return draw


def _draw_offline(_: object, kv_capacity: int, n: int, rng: Generator) -> Instance:
    if rng.random() < 0.5:
        return wide_first(kv_capacity, n, int(rng.integers(1, max(2, n // 2))))

    return _draw_uniform(n, kv_capacity, 0, rng)


def _draw_online(policy: str | Scheduler, kv_capacity: int, n: int, rng: Generator) -> Instance:
    if rng.random() < 0.3:
        return _draw_adaptive(policy, kv_capacity, n, rng)

    return _draw_uniform(n, kv_capacity, int(rng.integers(1, kv_capacity)), rng)


def _draw_uniform(n: int, kv_capacity: int, last: int, rng: Generator) -> Instance:
    """Draw requests that arrive up to round ``last``, of any size that fits alone."""
    prompt = rng.integers(1, kv_capacity, size=n)
    output = np.array([rng.integers(1, kv_capacity - s + 1) for s in prompt])
    return Instance(
        np.sort(rng.integers(0, last + 1, size=n)), prompt, output, kv_capacity=kv_capacity
    )


FAMILIES: dict[str, Family] = {
    "online": _draw_online,
    "offline": _draw_offline,
    "theorem-4.1": _draw_adaptive,
    "two-point": _draw_two_point,
    "geometric": _family_of(geometric),
    "weighted-geometric": _family_of(weighted_geometric),
}
"""Functions ``(policy, kv_capacity, n, generator) -> Instance`` that draw first instances.

In ``online`` requests arrive at any time, in ``offline`` all arrive at 0. The others are small
instances of the papers' families.
"""
