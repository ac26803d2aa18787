"""TRAIL's predictor (000): how much a classifier of every token and its filter gain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.base import measured
from optsched.experiments.studies.trail import SETTINGS, above, by_draw, over_draws, text, workload
from optsched.problem.instance import Instance
from optsched.workloads.predict import predict


def errors(told: Instance) -> tuple[float, float]:
    """Return the mean absolute error over all tokens that a request has produced one by one.

    Of its forecast, and of the first prediction with the tokens produced counted off, as the
    paper compares them (section 4.1).
    """
    o, forecast = told.output_tokens, told.forecast
    assert forecast is not None
    left: NDArray[np.int64] = np.repeat(forecast.offsets[1:], o) - np.arange(forecast.offsets[-1])
    late = np.ones(len(left), dtype=bool)
    late[forecast.offsets[:-1]] = False
    once = np.maximum(1.0, np.repeat(forecast.first - o, o) + left)
    return (
        float(np.abs(forecast.remaining - left)[late].mean()),
        float(np.abs(once - left)[late].mean()),
    )


def prediction_trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per noise, bias and draw."""
    for noise in parameters["noise"]:
        for bias in parameters["bias"]:
            for draw in range(parameters["draws"]):
                yield {
                    "noise": noise, "bias": bias, "draw": draw,
                    "requests": parameters["requests"], "seed": seed,
                }  # fmt: skip


def run_prediction(trial: Row) -> Row:
    """Return the errors of one classifier without the filter, and with it, in both readings."""
    return measured(lambda: _run_prediction(trial))


def _run_prediction(trial: Row) -> Row:
    seed = 1000 * trial["seed"] + trial["draw"]
    instance = workload(trial["requests"], None, SETTINGS["seats"], seed)
    spec = f"trail:noise={trial['noise']},bias={trial['bias']}"
    refined, once = errors(predict(instance, spec, seed=seed))
    return {
        "one_off": once,
        "classifier": errors(predict(instance, f"{spec},refine=false", seed=seed))[0],
        "printed": errors(predict(instance, f"{spec},feedback=false", seed=seed))[0],
        "refined": refined,
    }


def summarize_predictions(rows: Sequence[Row]) -> list[Claim]:
    """Return section 4.1's figure for the predictor's defaults, and what the filter gains."""
    default = {"noise": 60.0, "bias": 0.21}
    refined = by_draw(rows, "refined", default)
    once, raw, printed = (
        over_draws({k: v / refined[k] for k, v in by_draw(rows, name, default).items()})
        for name in ("one_off", "classifier", "printed")
    )
    return [
        Claim(
            "error of one-off predictions over refined ones",
            2.66,
            None if once is None else round(once.mean, 3),
        ),
        above("the classifier's own error over that of refined predictions", raw),
        Claim("the printed equation's over that of refined ones", "not stated", text(printed)),
    ]


PREDICTIONS = Experiment(
    name="trail-predictions",
    summary="TRAIL's predictor: errors of one-off, classified and refined predictions",
    paper="000, sections 3.1 and 4.1 (Figures 3 and 4)",
    parameters={
        "draws": 5,
        "requests": 3000,
        "noise": [20.0, 60.0, 120.0],
        "bias": [0.0, 0.1, 0.21, 0.3],
    },
    trials=prediction_trials,
    run=run_prediction,
    summarize=summarize_predictions,
    columns={
        "noise": "spread of the classifier's reading with every token, tokens",
        "bias": "spread of its relative error that stays with a request",
        "draw": "which draw of requests and predictions",
        "one_off": "mean absolute error of the first prediction less the tokens produced, tokens",
        "classifier": "of the classifier's bins, without the filter, tokens",
        "printed": "of the filter by the printed equation, tokens",
        "refined": "of the filter whose posterior is the next prior, tokens",
        "error": "why there are none",
    },
    figures=[
        Figure(
            "errors", "bias", ("one_off", "classifier", "printed", "refined"), panel="noise",
            y_label="mean absolute error [tokens]", title="TRAIL's predictor",
        )
    ],
)  # fmt: skip
