"""TRAIL's predictor (Shahout et al. 2024, section 3.1): bins, refined by a Bayesian filter.

k equal bins cover the tokens left from 0 to ``longest``. After every token, a classifier reads the
model's embeddings and gives each bin a probability. A filter that knows how lengths shrink turns
these into a posterior. The prediction is the posterior's mean over the middles of the bins. The
classifier here is synthetic.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.problem.errors import InputError
from optsched.problem.forecast import Forecast
from optsched.problem.instance import Instance
from optsched.problem.memory import check_size
from optsched.workloads.predict import Columns, Guess, predictor

BINS, LONGEST = 10, 512
"""Number k of bins, and the tokens that they cover."""


def _predict_lengths(
    readings: NDArray[np.float64],
    offsets: NDArray[np.int64],
    noise: float,
    bias: float,
    bins: int,
    longest: float,
    refine: bool,
    feedback: bool,
) -> NDArray[np.float64]:
    """Return the predicted tokens left for every reading of the synthetic classifier.

    Request i has the readings ``offsets[i]:offsets[i + 1]``. The classifier's probabilities are a
    normal density around the reading, taken at the middles of the bins and normalised. Its variance
    adds up all that separates a reading from a middle: the noise, the bias, and w^2 / 12 for the
    width w of a bin. Each token moves one length in w to the bin below, or from the lowest bin to
    the end. The loops are plain, to be compiled. `refine`: whether the filter is applied at all.
    `feedback`: whether its next prior comes from the last posterior, and not from the last prior.
    """
    width = longest / bins
    predicted = np.empty(readings.shape[0])
    # By bin: the classifier's probability p, the posterior q, and the prior of the next token.
    p, q, prior = np.empty(bins), np.empty(bins), np.empty(bins)

    for i in range(offsets.shape[0] - 1):
        for entry in range(offsets[i], offsets[i + 1]):
            # The density is divided by its value at the bin that is nearest to the reading, so
            # that it is 1 there and the sum is never 0.
            y = readings[entry]
            two_variances = 2 * (noise**2 + width**2 / 12 + (bias * max(y, 0.0)) ** 2)
            near = min(bins - 1, max(0, int(np.floor(y / width))))
            nearest = (y - (near + 0.5) * width) ** 2
            mass = 0.0

            for j in range(bins):
                p[j] = np.exp((nearest - (y - (j + 0.5) * width) ** 2) / two_variances)
                mass += p[j]

            for j in range(bins):
                p[j] /= mass
            if entry == offsets[i] or not refine:  # nothing is known from before
                q[:] = p
                prior[:] = p
            else:
                if feedback:
                    prior[:] = q

                # One token later: lengths move down, and the reading weighs them.
                mass = 0.0
                for j in range(bins):
                    stay = prior[j] * (1 - 1 / width)
                    prior[j] = stay + (prior[j + 1] / width if j + 1 < bins else 0.0)
                    q[j] = prior[j] * p[j]
                    mass += q[j]

                if mass > 0:
                    for j in range(bins):
                        q[j] /= mass
                else:  # the prior excludes what is read: begin again
                    q[:] = p

            mean = 0.0
            for j in range(bins):
                mean += q[j] * (j + 0.5) * width

            predicted[entry] = mean

    return predicted


@cache
def _compiled() -> Any:
    from optsched.problem.kernel import njit  # loaded only where lengths are predicted

    return njit(_predict_lengths)


@predictor("trail", "TRAIL's forecast: bins from a synthetic classifier, refined with every token")
def trail(
    *,
    first: float = 0.5,
    noise: float = 60.0,
    bias: float = 0.21,
    bins: int = BINS,
    longest: int = LONGEST,
    refine: bool = True,
    feedback: bool = True,
) -> Guess:
    """Return TRAIL's predictor: one prediction from the prompt, then a new one with every token.

    Parameters
    ----------
    first : float
        Spread of the prediction from the prompt (by BERT in the paper). It is the middle of the
        bin that contains o exp(first Z) for an output of o tokens, with Z standard normal.
    noise : float
        Standard deviation, in tokens, of the classifier's error that is drawn anew with every
        token.
    bias : float
        Standard deviation of the classifier's relative error that stays with a request.
    bins : int
        Number of bins, from 2 to below ``longest``.
    longest : int
        Tokens that the bins cover.
    refine, feedback : bool
        Whether the filter is applied, and whether its next prior comes from the last posterior, as
        the paper's text says, or from the last prior, as its equation says, which forgets every
        reading but the first and the present one.

    Notes
    -----
    With o - t tokens left, the classifier reads (1 + bias B) (o - t) + noise Z. B is standard
    normal for each request and Z for each token. Noise alone would average out and make the filter
    better than the paper's. The bias stands for what a prompt or an answer does not reveal.

    Only one of the paper's figures is in its text: refined predictions have a mean absolute error
    2.66 times lower than predictions from the prompt. The default ``bias`` gives this ratio on
    outputs like Alpaca's (experiment ``trail-predictions``). ``first`` and ``noise`` are assumed.

    The entry before the first token is the prediction from the prompt, and those after it are the
    filter's, since the embedding of the prompt is known with the first token. A length beyond
    ``longest`` looks like one in the last bin until fewer tokens are left, and predictions from
    the prompt end at the middle of that bin. Values are rounded to hundredths of a token to keep
    files small.
    """
    for name, value in (("first", first), ("noise", noise), ("bias", bias)):
        if not value >= 0:
            raise InputError(f"{name}: found {value:g}; expected a number >= 0")

    if not 2 <= bins < longest:
        raise InputError(f"bins: found {bins} over {longest} tokens; expected 2 <= bins < longest")

    def guess(instance: Instance, generator: Generator) -> Columns:
        o = instance.output_tokens
        width = longest / bins
        offsets = np.concatenate([[0], np.cumsum(o)])
        # Each prediction takes a place in some six arrays of 8 bytes meanwhile.
        instead = "elis predicts once in many tokens"
        check_size(int(offsets[-1]), 50, "predictions, one a token", instead, "output_tokens")

        # What the classifier reads at each token of each request.
        tokens_left = np.repeat(offsets[1:], o) - np.arange(offsets[-1])
        scale = 1 + bias * generator.standard_normal(len(o))
        by_prompt = o * np.exp(first * generator.standard_normal(len(o)))
        errors = noise * generator.standard_normal(len(tokens_left))
        readings = np.repeat(scale, o) * tokens_left + errors
        values = _compiled()(readings, offsets, noise, bias, bins, longest, refine, feedback)

        # The first entry of each request is the prediction from the prompt: the middle of its bin.
        values[offsets[:-1]] = (np.minimum(by_prompt // width, bins - 1) + 0.5) * width

        return Forecast(1, offsets, np.round(values, 2))  # 1: a new one with every token

    return guess
