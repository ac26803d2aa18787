"""Cost models against end-to-end times that Splitwise measured (InferMax, Kim et al. 2024).

The measurements are those of Patel et al. 2024.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optsched.costs.devices import device
from optsched.costs.load import load_cost_model
from optsched.costs.profiles.identity import Claim as Asked
from optsched.costs.profiles.splitwise import COLUMNS, SPLITWISE_TOKENS
from optsched.experiments.base import Claim, Experiment, Row
from optsched.policies.base import Rules
from optsched.problem.errors import InputError

from .infermax import PAPER, fixed
from .parts import claim, distinct, judged, measured, picked, quiet, select

TIMES = {"prompt": "prompt_time", "token": "token_time", "e2e": "e2e_time"}
"""The quantities compared, and the columns of milliseconds in Splitwise's table."""


def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield one trial per measured batch (medians of repetitions) and cost model."""
    folder = parameters["data"] or os.environ.get("OPTSCHED_DATA", "")
    if not folder:
        raise InputError(
            "experiment infermax-validation: data: found no folder; expected --set data=FOLDER "
            "with Splitwise's perf_model.csv, or the environment variable OPTSCHED_DATA"
        )

    places = [Path(folder) / "perf_model.csv", Path(folder) / "splitwise" / "perf_model.csv"]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise InputError(f"{places[0]}: found no such file; expected Splitwise's perf_model.csv")

    degree = parameters["tensor_parallel"]
    asked = Asked(parameters["model"], degree, device(parameters["device"]))
    frame = asked.read(file, COLUMNS)
    # Longer outputs end early at an end-of-sequence token, which the table does not show.
    frame = frame[frame["token_size"] == SPLITWISE_TOKENS]

    for sizes, group in frame.groupby(["prompt_size", "batch_size"]):
        prompt, batch = (int(str(size)) for size in sizes)
        medians = group[list(TIMES.values())].median()
        for cost_model in parameters["cost_models"]:
            yield {
                "cost_model": cost_model,
                "prompt": prompt,
                "requests": batch,
                "output": SPLITWISE_TOKENS,
                **{f"measured_{name}_s": float(medians[c]) / 1000 for name, c in TIMES.items()},
            }


def run(trial: Row) -> Row:
    """Simulate the batch, and compare its times with the measured ones."""
    found = _simulated(trial)
    if found["error"] is None:
        for name in TIMES:
            found[f"{name}_error"] = found[f"{name}_s"] / trial[f"measured_{name}_s"] - 1

    # Some measurements are impossible: 64 prompts of 512 tokens in 0.8 s would need nine times the
    # peak of two A100.
    found["plausible"] = trial["measured_prompt_s"] > 1e-4 * trial["requests"] * trial["prompt"]
    return found


@measured
@quiet()
def _simulated(trial: Row) -> Row:
    """Return the times of one batch that prefills all prompts, and of the decodes after it."""
    roomy = trial["requests"] * (trial["prompt"] + trial["output"])
    cost = load_cost_model(trial["cost_model"].replace(";", ","))
    metrics = judged(fixed({**trial, "kv_capacity": roomy}), Rules(), cost).metrics
    return picked(metrics, {"prompt_s": "mean_ttft", "token_s": "mean_tpot", "e2e_s": "makespan"})


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the mean errors. Section 2.3 quotes 9 % for Vidur."""
    claims = []
    for cost_model in distinct(rows, "cost_model"):
        here = select(rows, cost_model=cost_model, plausible=True, error=None)
        for name, words in (("e2e", "end to end"), ("prompt", "prefill"), ("token", "decode")):
            errors = [abs(row[f"{name}_error"]) for row in here]
            if errors:
                what = f"{cost_model}: mean error, {words} (most {max(errors):.1%})"
                average = float(np.mean(errors))
                claims.append(claim(what, "<= 9 % (Vidur)", average, lambda v: v <= 0.09, ".1%"))

    return claims


EXPERIMENT = Experiment(
    name="infermax-validation",
    summary="cost models against Splitwise's measured prefill, decode and end-to-end times",
    paper=f"{PAPER}, sections 2.3 and A.2; measurements of Splitwise (needs its perf_model.csv)",
    parameters={
        "data": "",
        "model": "llama2-70b",
        "device": "a100-80gb",
        "tensor_parallel": 2,
        "cost_models": [
            "llama2-70b-tp2-a100-splitwise-fit",
            "llama2-70b-tp2-a100-splitwise",
            "llama2-70b-tp2-a100-derived",
            "roofline:llama2-70b;tp=2",
        ],
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "measured_prompt_s": "median measured prefill time",
        "measured_token_s": "median measured time per output token",
        "measured_e2e_s": "median measured time of the batch",
        "prompt_s": "simulated prefill time; token_s and e2e_s are the other simulated times",
        "prompt_error": "simulated over measured prefill time, minus 1; likewise the other errors",
        "plausible": "whether the devices' peaks allow the measurement",
    },
)
