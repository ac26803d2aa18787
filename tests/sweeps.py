"""How many random cases a test takes: few in ``make test``, the others in ``make test-slow``."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(quick: int, whole: int) -> list[Any]:
    """Return the seeds 0 to ``whole`` - 1 as parameters; those from ``quick`` on are slow."""
    slow = pytest.mark.slow
    return [*range(quick), *(pytest.param(seed, marks=slow) for seed in range(quick, whole))]


def parts(quick: int, whole: int) -> list[Any]:
    """Return ``range(whole)`` as two parameters, cut at ``quick``; the second part is slow."""
    rest = range(quick, whole)
    return [
        pytest.param(range(quick), id="quick"),
        pytest.param(rest, id="rest", marks=pytest.mark.slow),
    ]
