"""TRAIL's predictor: bins, the Bayesian filter, and the accuracy of the synthetic classifier."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from optsched_studies.trail import ALPACA, errors

from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict
from optsched.workloads.predict.trail import (
    BINS,
    LONGEST,
    _predict_lengths,
    trail,
)


def middles(bins: int = BINS, longest: float = LONGEST) -> NDArray[np.float64]:
    """Return m_i, the middle of each bin in tokens, shape (bins,)."""
    return np.asarray((np.arange(bins) + 0.5) * (longest / bins))


def class_probabilities(
    readings: NDArray[np.float64],
    noise: float,
    bias: float,
    *,
    bins: int = BINS,
    longest: float = LONGEST,
) -> NDArray[np.float64]:
    """Return what the synthetic classifier makes of its readings, shape (tokens, bins).

    A normal density around the reading at the middles of the bins, normalised. Its variance is
    that of all that lies between a reading and a middle: noise, bias, and a bin's width, w^2 / 12.
    """
    y = readings[:, None]
    variance = noise**2 + (longest / bins) ** 2 / 12 + (bias * np.maximum(y, 0.0)) ** 2
    density = -((y - middles(bins, longest)) ** 2) / (2 * variance)
    density = np.exp(density - density.max(axis=1, keepdims=True))
    return density / density.sum(axis=1, keepdims=True)


def transition(bins: int = BINS, longest: float = LONGEST) -> NDArray[np.float64]:
    """Return the filter's transition matrix T, with lengths uniform within a bin of width w.

    Each token moves one length in w to the bin below, or from the lowest bin to the end.
    """
    out = bins / longest
    return np.diag(np.full(bins, 1 - out)) + np.diag(np.full(bins - 1, out), 1)


def refine_probabilities(
    probabilities: ArrayLike, *, longest: float = LONGEST, feedback: bool = True
) -> NDArray[np.float64]:
    """Return the filter's posterior after every token of one request.

    With `feedback` the next prior is T times the last *posterior*, as the paper's text says; else T
    times the last prior, as its equation says, which forgets every p(t) but the first.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    matrix = transition(p.shape[1], longest)
    q = p.copy()
    prior = p[0]

    for t in range(1, len(p)):
        prior = matrix @ (q[t - 1] if feedback else prior)
        both = prior * p[t]
        if both.sum() > 0:
            q[t] = both / both.sum()

    return q


def test_bins_are_those_of_the_paper() -> None:
    # m_i = 128 (2 i + 1) / 5 for i = 0..9, which is 25.6 (2 i + 1): bins of 51.2 tokens.
    assert middles().tolist() == pytest.approx([25.6 * (2 * i + 1) for i in range(10)])
    matrix = transition()
    assert matrix.shape == (10, 10)
    assert np.diag(matrix).tolist() == pytest.approx([1 - 1 / 51.2] * 10)
    assert np.diag(matrix, 1).tolist() == pytest.approx([1 / 51.2] * 9)
    # From any bin but the lowest all mass arrives; the lowest loses what has ended.
    assert matrix.sum(axis=0).tolist() == pytest.approx([1 - 1 / 51.2] + [1] * 9)


def test_the_filter_by_hand() -> None:
    # Two bins of width 4: T = [[3/4, 1/4], [0, 3/4]]. p(0) = (1/2, 1/2), p(1) = (1/3, 2/3):
    # prior (1/2, 3/8); products 1/6, 1/4; q(1) = (2/5, 3/5). p(2) = (1/2, 1/2): prior
    # (3/10 + 3/20, 9/20) = (9/20, 9/20), q(2) = (1/2, 1/2).
    p = [[1 / 2, 1 / 2], [1 / 3, 2 / 3], [1 / 2, 1 / 2]]
    q = refine_probabilities(p, longest=8)
    assert q.tolist() == [[0.5, 0.5], pytest.approx([0.4, 0.6]), pytest.approx([0.5, 0.5])]
    # The printed equation: priors (1/2, 3/8), then (3/8 + 3/32, 9/32) = (15/32, 9/32), whatever
    # p(1) said: q(2) = (5/8, 3/8).
    q = refine_probabilities(p, longest=8, feedback=False)
    assert q[1].tolist() == pytest.approx([0.4, 0.6])
    assert q[2].tolist() == pytest.approx([5 / 8, 3 / 8])


def test_a_classifier_that_excludes_the_prior_is_believed() -> None:
    # From the lower bin nothing leads to the upper one.
    q = refine_probabilities([[1.0, 0.0], [0.0, 1.0]], longest=8)
    assert q.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("refine", [True, False])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("bins", "longest"), [(10, 512), (3, 20)])
def test_the_compiled_predictor_is_the_readable_one(refine, feedback, bins, longest) -> None:
    """Against the functions above, which take whole matrices, and against the same loop
    uncompiled."""

    from optsched.workloads.predict.trail import _compiled

    generator = np.random.default_rng(4)
    offsets = np.array([0, 1, 40, 160])
    readings = generator.normal(150, 120, size=160)  # some below 0, some beyond the last bin
    # Noise of 30 tokens, bias 0.2.
    options = (30.0, 0.2, bins, longest, refine, feedback)
    fast = _compiled()(readings, offsets, *options)
    assert fast.tolist() == pytest.approx(
        _predict_lengths(readings, offsets, *options).tolist(), rel=1e-12
    )
    for a, b in pairwise(offsets):
        p = class_probabilities(readings[a:b], 30.0, 0.2, bins=bins, longest=longest)
        q = refine_probabilities(p, longest=longest, feedback=feedback) if refine else p
        assert fast[a:b].tolist() == pytest.approx((q @ middles(bins, longest)).tolist(), rel=1e-9)


def test_the_filter_gains_on_the_classifier_and_the_printed_equation_gains_less() -> None:
    instance = generate("lognormal", seed=5, n=600, **ALPACA)
    refined, printed, raw = (
        errors(predict(instance, f"trail{options}"))[0]
        for options in ("", ":feedback=false", ":refine=false")
    )
    # Mean errors: the printed equation gains a twentieth at least, and feedback a quarter more.
    assert refined < 0.75 * printed
    assert printed < 0.95 * raw


def test_the_first_entry_is_the_middle_of_a_bin_and_long_outputs_look_like_the_last() -> None:
    # Ten bins cover 512 tokens, 51.2 each: the middle of the last is 512 - 25.6 = 486.4.
    instance = Instance(np.zeros(50), np.ones(50), np.full(50, 2000), kv_capacity=9000)
    exact = predict(instance, "trail:first=0,noise=0,bias=0").forecast
    assert exact is not None
    assert exact.first.tolist() == [486.4] * 50
    one = exact.remaining[exact.offsets[0] : exact.offsets[1]]
    assert one[1] == pytest.approx(486.4)  # 1999 left: beyond the last bin
    assert one[-1] < 40  # 1 left: in the first, whose middle is 25.6; of the second it is 76.8
    told = predict(instance.subset(range(3)), "trail:first=0.9").forecast
    assert told is not None
    assert set(told.first.tolist()) <= set(np.round(middles(), 2).tolist())


def test_predictions_are_no_echo_of_what_the_same_seed_drew_elsewhere() -> None:
    # Lengths and errors from one seed must not be the same normals.
    instance = generate("lognormal", seed=3, n=4000, **ALPACA)
    noisy = predict(instance, "noisy:mae=20", seed=3).predicted
    assert noisy is not None
    error = noisy - instance.output_tokens
    for column in (instance.prompt_tokens, instance.output_tokens):
        # Of 4,000 independent pairs the standard error is 1 / sqrt(4000) = 0.016.
        assert abs(np.corrcoef(error, np.log(column))[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"noise": -1.0}, "noise: found -1; expected a number >= 0"),
        ({"first": float("nan")}, "first: found nan; expected a number >= 0"),
        ({"bias": -0.5}, "bias: found -0.5; expected a number >= 0"),
        ({"bins": 1}, "bins: found 1 over 512 tokens; expected 2 <= bins < longest"),
        ({"bins": 9, "longest": 9}, "bins: found 9 over 9 tokens; expected 2 <= bins < longest"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(options: dict, text: str) -> None:
    with pytest.raises(InputError, match=text):
        trail(**options)
