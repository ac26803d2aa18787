"""Random streams: every use of one seed draws coins of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

Seed = int | Sequence[int]
"""A seed, or the numbers of a study, a trial and a run."""

_USES = ("instance", "predictor", "policy", "router", "drafts")


def stream(seed: Seed, use: str, *which: int) -> Generator:
    """Return the generator of one use of a seed: ``"predictor"``, ``"policy"`` and so on.

    `optsched.generate` draws from ``default_rng(seed)``, which no key of a child gives. A policy
    that drew from it, too, would order requests by the numbers that made their lengths.

    `which`: its worker, if each has coins of its own.
    """
    key = (_USES.index(use), *which)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
