"""How the growth of the ramp relaxation's graphs is predicted, and learned from what is seen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optsched.bounds.checker.parts import TooLarge
from optsched.optimize.ramp.climb import Climb, Ladder, Seen
from optsched.optimize.ramp.jobs import periods
from optsched.optimize.ramp.relaxation import Growth, Relaxation
from optsched.workloads.generate import generate


def test_the_logarithm_of_the_growth_falls_as_a_square_towards_the_bound() -> None:
    growth = Growth(16.0, 200)
    # x = 0, 0.5, 1: x (2 - x) = 0, 0.75, 1, and 16^0.75 = 8. Beyond the value nothing changes.
    assert growth.below(np.array([100, 150, 200, 300]), 100).tolist() == [1.0, 8.0, 16.0, 16.0]
    # Half the bend: 0.75^0.5 = 0.866 of the logarithm. None: all of it.
    assert growth._replace(bend=0.5).below(150, 100) == pytest.approx(16 ** math.sqrt(0.75))
    assert growth._replace(bend=0.0).below(150, 100) == 16.0
    # A graph is not expected to shrink.
    assert Growth(0.5, 200).below(150, 100) == 1.0


@pytest.mark.parametrize(
    ("measured", "part", "lowest", "growth", "bend"),
    [
        (4.0, 0.5, 1.0, 16.0, 1.0),  # as expected: 16^0.5
        (2.0, 0.5, 1.0, 4.0, 1.0),  # less: all paths should grow by 2^(1 / 0.5)
        (1.2, 0.1, 1.0, 1.2**2.5, 1.0),  # ... but nothing is concluded from a part below 0.4
        (0.3, 0.3, 1.0, 1.0, 1.0),  # more was deleted than added: other paths will grow, if little
        (8.0, 0.5, 1.0, 16.0, math.log(0.75, 0.5)),  # more: 8 = 16^0.75, and 0.5^bend = 0.75
        (20.0, 0.5, 20.0, 20.0, 0.0),  # more than all paths should grow by
        (20.0, 1.0, 20.0, 20.0, 1.0),
    ],
)
def test_what_is_learned_explains_what_was_seen(
    measured: float, part: float, lowest: float, growth: float, bend: float
) -> None:
    """All paths were expected to grow by 16, and those below the target by 16^part; `Seen`
    learns from the growth measured."""
    seen = Seen()
    seen.learn(measured, 16.0, part)
    assert (seen.lowest, seen.growth, seen.bend) == pytest.approx((lowest, growth, bend))


def test_a_step_that_was_too_large_is_expected_to_be_so_the_next_time() -> None:
    # A step that needs over 1.5 times the nodes is refused with room for 1.5 times as many. The
    # next plan, of this climb or of a fork, expects that many at least, though `share` says hardly
    # any.
    jobs = periods(generate("jaillet-model-1", seed=3, n=14))[0]
    # 800 is the value that is taken as known; 1e4 and 10**6 are rooms for nodes.
    relaxation = Relaxation(jobs, 800)
    climb = Climb(relaxation, Ladder(relaxation))
    climb.take(climb.plan(1e4, 800)[0], 10**6, 800)
    relaxation.ascend()
    relaxation.cut((relaxation.bound + 800) // 2)
    bound, target, rung, nodes = relaxation.graph_bound, relaxation.upper, climb.rung, climb.nodes
    to, planned = climb.plan(1.0, 800)  # with so little room, the next rung
    climb.fork().take(to, 10**6, 800)
    most = int(1.5 * nodes)
    assert climb.seen.pop((rung, to)).growth > 1.5
    climb.share /= 100.0  # so that hardly any growth is expected
    assert climb.plan(1.0, 800)[1].factor < planned.factor
    with pytest.raises(TooLarge):
        climb.take(to, most, 800)
    assert (climb.rung, climb.nodes) == (rung, nodes)
    for again in (climb, climb.fork()):
        after = again.plan(1.0, 800)
        assert after[0] == to
        assert after[1].below(target, bound) * nodes >= most
