"""The iterative predictor of ELIS (Choi et al. 2025), whose error falls from window to window."""

import numpy as np
from numpy.random import Generator

from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError
from optsched.problem.forecast import Forecast
from optsched.problem.instance import Instance
from optsched.problem.memory import check_size
from optsched.workloads.predict import Columns, Guess, predictor

SPREAD = 1.5877
"""Standard deviation of the first prediction's error at one token left, in tokens."""
POWER = 0.6861
"""How that deviation grows with the tokens left."""


@predictor("elis", "tokens left, predicted again every window; the error falls as a request runs")
def elis(*, window: int = 50, error: float = 1.0, decay: float = 0.8) -> Guess:
    """Return the predictor of ELIS: tokens left, predicted anew every window (Choi et al. 2025).

    With r tokens left after k windows, the prediction has a normal error with standard deviation
    ``error * SPREAD * r**POWER * decay**k`` tokens. A prediction is never below 1.

    Parameters
    ----------
    window : int
        Tokens from one prediction to the next, >= 1 (50 in the paper).
    error : float
        Factor of all errors, >= 0; 0 gives the true lengths.
    decay : float
        Factor of the error per window, in (0, 1].

    Notes
    -----
    The errors are fitted to two figures of the paper for its predictor, over all prompts and
    windows: a mean absolute error of 19.923 and a root mean square error of 34.327 tokens (section
    4.2). ``SPREAD`` and ``POWER`` give exactly these figures for predictions cut at 1, on outputs
    of the generator ``lognormal`` (mean 85.32, median 45, at most 883 tokens) with windows of 50
    tokens.

    The paper shows that the mean absolute error falls from window to window (Figure 2b), but its
    text has no number. Here 0.8 is the largest multiple of 0.05 for ``decay`` at which the error
    falls too: from 23.1 in the first window to 18.2 in the fourth and 11.3 in the seventh. Later
    windows have only the longer outputs, whose errors are larger, so that with a decay of 0.85 the
    error stays level over three windows.

    Errors of different windows are independent here. The paper does not say whether they are.
    """
    check_whole(window, "window", 1)
    if not 0 <= error < float("inf"):
        raise InputError(f"error: found {error:g}; expected a factor >= 0")
    if not 0 < decay <= 1:
        raise InputError(f"decay: found {decay:g}; expected 0 < decay <= 1")

    def guess(instance: Instance, generator: Generator) -> Columns:
        counts = (instance.output_tokens - 1) // window + 1
        offsets = np.concatenate([[0], np.cumsum(counts)])
        # Each prediction takes a place in some six arrays of 8 bytes meanwhile.
        what = f"predictions, one every {window} tokens"
        check_size(int(offsets[-1]), 50, what, "a larger window", "output_tokens")
        # The windows that are over at each prediction.
        windows = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        tokens_left = np.repeat(instance.output_tokens, counts) - window * windows
        spread = error * SPREAD * tokens_left**POWER * decay**windows
        predicted = tokens_left + spread * generator.standard_normal(len(tokens_left))

        return Forecast(window, offsets, np.maximum(1.0, predicted))

    return guess
