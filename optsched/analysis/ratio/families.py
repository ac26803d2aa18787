"""Adversarial families of instances from the papers, in rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.analysis.theory import geometric_shares, weighted_geometric_shares
from optsched.judge.evaluate import evaluate
from optsched.policies import Scheduler
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, LoopError
from optsched.problem.instance import Instance


def against(policy: str | Scheduler, kv_capacity: int, *, seed: int = 0) -> Instance:
    """Return what the adversary of Jaillet et al. 2025, Theorem 4.1 asks of a policy.

    One request with s = 1 and o = M - 1 comes at 0. The adversary watches the policy start it,
    at b, and then sends M / 2 requests with s = 1 and o = 1 at b + M - sqrt(M) / 2, when the
    first one holds all but about sqrt(M) / 2 tokens for about as many rounds. Until then the
    policy has seen nothing but the long request, so that it does the same again.

    Parameters
    ----------
    policy : str, Rules, Windows or Policy
        Deterministic, else the adversary answers the start of this seed.
    kv_capacity : int
        M, at least 4.
    seed : int

    Raises
    ------
    InputError
        A smaller capacity.
    LoopError
        The policy never starts the long request.

    Notes
    -----
    The arrival is rounded down to whole rounds; where M is no even square this is not worse
    than the paper's.
    """
    if kv_capacity < 4:
        raise InputError(f"kv_capacity: {kv_capacity}; an integer >= 4 is right")
    start = _start_of_long(policy, kv_capacity, seed)
    short = kv_capacity // 2
    release = start + kv_capacity - math.isqrt(kv_capacity) // 2
    return _rounds(
        [0] + [release] * short,
        [1] * (short + 1),
        [kv_capacity - 1] + [1] * short,
        kv_capacity,
        f"theorem-4.1-m{kv_capacity}",
    )


def _start_of_long(policy: str | Scheduler, kv_capacity: int, seed: int) -> int:
    """Return when a policy starts a request with s = 1 and o = M - 1 that is alone."""
    alone = _rounds([0], [1], [kv_capacity - 1], kv_capacity)
    return int(evaluate(alone, simulate(alone, policy, seed=seed)).finish[0]) - (kv_capacity - 1)


def _rounds(
    arrival: Sequence[int],
    prompt: Sequence[int],
    output: Sequence[int],
    kv_capacity: int,
    name: str = "",
) -> Instance:
    return Instance(
        arrival=np.array(arrival),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
        kv_capacity=kv_capacity,
        name=name,
    )


def from_shares(
    shares: ArrayLike,
    n: int,
    *,
    kv_capacity: int,
    first: int = 1,
    prompt: int = 1,
    rng: np.random.Generator | None = None,
    name: str = "",
) -> Instance:
    """Return ``n`` requests at 0 with outputs in proportion, or drawn if there is a generator.

    Parameters
    ----------
    shares : array_like
        Of the lengths ``first``, ``first + 1``, ...
    n : int
    kv_capacity, first, prompt : int
        All predictions are [first, last length], all prompts equal.
    """
    x = np.asarray(shares, dtype=np.float64)
    x = x / x.sum()
    last = first + len(x) - 1
    if rng is not None:
        counts = rng.multinomial(n, x)
    else:  # largest remainders
        counts = np.floor(x * n).astype(np.int64)
        rest = np.argsort(counts - x * n, kind="stable")
        counts[rest[: n - counts.sum()]] += 1
    output: NDArray[np.int64] = np.repeat(np.arange(first, last + 1), counts)
    return Instance(
        arrival=np.zeros(n, dtype=np.int64),
        prompt_tokens=np.full(n, prompt),
        output_tokens=output,
        kv_capacity=kv_capacity,
        predicted_lower=np.full(n, first),
        predicted_upper=np.full(n, last),
        name=name,
    )


def two_point(
    short: int, long: int, share: float, n: int, *, kv_capacity: int, prompt: int = 1
) -> Instance:
    """Return outputs l or u, a share of them l (Chen et al. 2025, section 5.1)."""
    if not (1 <= short < long and 0 <= share <= 1):
        raise InputError(
            f"short, long, share: {short}, {long}, {share}; 1 <= short < long and a share in "
            "[0, 1] are right"
        )
    x = np.zeros(long - short + 1)
    x[0], x[-1] = share, 1 - share
    return from_shares(
        x, n, kv_capacity=kv_capacity, first=short, prompt=prompt, name=f"two-point-{short}-{long}"
    )


def geometric(
    q: float,
    n: int,
    *,
    kv_capacity: int,
    longest: int,
    prompt: int = 1,
    rng: np.random.Generator | None = None,
) -> Instance:
    """Return outputs of G(1 - q), cut at ``longest`` (Chen et al. 2025, section 5.2)."""
    shares = geometric_shares(q, longest)
    return from_shares(
        shares, n, kv_capacity=kv_capacity, prompt=prompt, rng=rng, name=f"geometric-{q:g}"
    )


def weighted_geometric(
    q: float,
    n: int,
    *,
    kv_capacity: int,
    longest: int,
    prompt: int = 1,
    rng: np.random.Generator | None = None,
) -> Instance:
    """Return outputs of LG(1 - q), cut at ``longest`` (Chen et al. 2025, section 5.3)."""
    shares = weighted_geometric_shares(q, longest)
    return from_shares(
        shares, n, kv_capacity=kv_capacity, prompt=prompt, rng=rng, name=f"weighted-{q:g}"
    )


def identical(n: int, prompt: int, output: int, *, kv_capacity: int) -> Instance:
    """Return equal requests at 0 (Jaillet et al. 2025, Theorem 4.3)."""
    return _rounds([0] * n, [prompt] * n, [output] * n, kv_capacity, "identical")


def blocked_shorts(policy: str | Scheduler, kv_capacity: int, n: int, seed: int) -> Instance:
    """Return a small adversary: a long request, then short ones that never fit beside it.

    As Theorem 4.1's with few requests: prompts of M - 1 tokens, one each round from the policy's
    start of the long request on, where waiting a few rounds with the long one is best.
    """
    long, start = kv_capacity - 1, 0
    with suppress(LoopError):
        start = _start_of_long(policy, kv_capacity, seed)
    return _rounds(
        [0, *range(start + 1, start + n)],
        [1] + [kv_capacity - 1] * (n - 1),
        [long] + [1] * (n - 1),
        kv_capacity,
        f"blocked-m{kv_capacity}-n{n}",
    )


def wide_first(kv_capacity: int, n: int, wide: int) -> Instance:
    """Return requests at 0: wide ones, and narrow ones whose outputs are one token longer.

    The order of outputs serves ``wide`` requests of output a first, one after the other; all
    the others, of output a + 1 and prompt 1, fit together.
    """
    narrow = max(1, n - wide)
    a = max(1, kv_capacity // narrow - 2)
    return _rounds(
        [0] * (wide + narrow),
        [kv_capacity - a] * wide + [1] * narrow,
        [a] * wide + [a + 1] * narrow,
        kv_capacity,
        f"wide-first-m{kv_capacity}-n{wide + narrow}",
    )


def _draw_adaptive(
    policy: str | Scheduler, kv_capacity: int, n: int, rng: np.random.Generator
) -> Instance:
    seed = int(rng.integers(2**31))
    if rng.random() < 0.5:
        return blocked_shorts(policy, kv_capacity, n, seed)
    return against(policy, max(4, min(kv_capacity, 2 * (n - 1))), seed=seed)


def _draw_two_point(_: object, kv_capacity: int, n: int, rng: np.random.Generator) -> Instance:
    long = int(rng.integers(2, max(3, kv_capacity // 2)))
    short = int(rng.integers(1, long))
    return two_point(short, long, float(rng.random()), n, kv_capacity=kv_capacity)


def _draw_geometric(_: object, kv_capacity: int, n: int, rng: np.random.Generator) -> Instance:
    q, longest = float(rng.random()), kv_capacity // 2
    return geometric(q, n, kv_capacity=kv_capacity, longest=longest, rng=rng)


def _draw_weighted(_: object, kv_capacity: int, n: int, rng: np.random.Generator) -> Instance:
    q, longest = float(rng.random()), kv_capacity // 2
    return weighted_geometric(q, n, kv_capacity=kv_capacity, longest=longest, rng=rng)


def _draw_offline(_: object, kv_capacity: int, n: int, rng: np.random.Generator) -> Instance:
    if rng.random() < 0.5:
        return wide_first(kv_capacity, n, int(rng.integers(1, max(2, n // 2))))
    return _draw_uniform(n, kv_capacity, 0, rng)


def _draw_online(
    policy: str | Scheduler, kv_capacity: int, n: int, rng: np.random.Generator
) -> Instance:
    if rng.random() < 0.3:
        return _draw_adaptive(policy, kv_capacity, n, rng)
    return _draw_uniform(n, kv_capacity, int(rng.integers(1, kv_capacity)), rng)


def _draw_uniform(n: int, kv_capacity: int, last: int, rng: np.random.Generator) -> Instance:
    prompt = rng.integers(1, kv_capacity, size=n)
    output = np.array([rng.integers(1, kv_capacity - s + 1) for s in prompt])
    return Instance(
        np.sort(rng.integers(0, last + 1, size=n)), prompt, output, kv_capacity=kv_capacity
    )


Family = Callable[[str | Scheduler, int, int, np.random.Generator], Instance]

FAMILIES: dict[str, Family] = {
    "online": _draw_online,
    "offline": _draw_offline,
    "theorem-4.1": _draw_adaptive,
    "two-point": _draw_two_point,
    "geometric": _draw_geometric,
    "weighted-geometric": _draw_weighted,
}
"""Draws of first instances: ``(policy, kv_capacity, n, generator) -> Instance``.

In ``online`` arrivals may be anywhere, in ``offline`` they are all at 0; the others are those of
the papers, small.
"""
