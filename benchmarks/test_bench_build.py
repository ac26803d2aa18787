"""Building the hindsight program and handing it to HiGHS, at 500,000 nonzeros and more."""

from __future__ import annotations

import numpy as np

from optsched import Instance
from optsched.optimize.formulations.rounds.integer_program import linear_model, program
from optsched.optimize.solvers.base import SolveOptions


def paper_scale() -> Instance:
    """Return 40 requests of the paper's first synthetic model, M = 40."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(1, 6, 40)
    output = np.array([rng.integers(1, 41 - s) for s in prompt])
    return Instance(np.zeros(40, dtype=int), prompt, output, 40)


def test_build_half_a_million_nonzeros(benchmark):
    prog = program(paper_scale())
    model = benchmark(linear_model, prog)
    assert model.entries >= 500_000


def test_windows_and_placement(benchmark):
    prog = benchmark(program, paper_scale())
    assert (prog.last >= prog.warm).all()


def test_hand_over_to_highs(benchmark):
    from optsched.optimize.solvers.highs import arguments, highs_options
    from optsched.optimize.solvers.highs_worker import loaded

    model = linear_model(program(paper_scale()))
    options = highs_options(SolveOptions(threads=1), True)
    highs = benchmark(lambda: loaded(arguments(model), options))
    assert highs.getNumNz() == model.entries
