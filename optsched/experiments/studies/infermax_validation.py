"""Cost models held against Splitwise's measured end-to-end times."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optsched.costs.cost import load_cost_model
from optsched.costs.hardware import device
from optsched.costs.profiles import SPLITWISE_TOKENS, splitwise_rows
from optsched.experiments import Claim, Experiment, Row
from optsched.experiments.base import measured
from optsched.experiments.studies.offline import quiet
from optsched.judge.evaluate import evaluate
from optsched.policies.base import Rules
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per measured batch (medians of repetitions) and cost model."""
    folder = parameters["data"] or os.environ.get("OPTSCHED_DATA", "")
    if not folder:
        raise InputError(
            "experiment infermax-validation: data: no folder; --set data=FOLDER with Splitwise's "
            "perf_model.csv, or the environment variable OPTSCHED_DATA, is right"
        )
    places = [Path(folder) / "perf_model.csv", Path(folder) / "splitwise" / "perf_model.csv"]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise InputError(f"{places[0]}: no such file; Splitwise's perf_model.csv is right")
    degree = parameters["tensor_parallel"]
    frame = splitwise_rows(file, parameters["model"], degree, device(parameters["device"]))
    # Longer outputs end early, at an end-of-sequence token that the table does not show.
    frame = frame[frame["token_size"] == SPLITWISE_TOKENS]
    columns = ["prompt_time", "token_time", "e2e_time"]
    for sizes, group in frame.groupby(["prompt_size", "batch_size"]):
        prompt, batch = (int(str(size)) for size in sizes)
        medians = group[columns].median()
        for cost_model in parameters["cost_models"]:
            yield {
                "cost_model": cost_model,
                "prompt": prompt,
                "requests": batch,
                "output": SPLITWISE_TOKENS,
                "measured_prompt_s": float(medians["prompt_time"]) / 1000,
                "measured_token_s": float(medians["token_time"]) / 1000,
                "measured_e2e_s": float(medians["e2e_time"]) / 1000,
            }


def run(trial: Row) -> Row:
    """Simulate the batch: one prefill of all prompts, then decodes together."""

    def times() -> Row:
        n = trial["requests"]
        instance = Instance(
            arrival=np.zeros(n),
            prompt_tokens=np.full(n, trial["prompt"]),
            output_tokens=np.full(n, trial["output"]),
            kv_capacity=n * (trial["prompt"] + trial["output"]),
            time_unit="second",
            kv_accounting="cached",
        )
        cost = load_cost_model(trial["cost_model"].replace(";", ","))
        with quiet():
            judged = evaluate(instance, simulate(instance, Rules(), cost), cost)
        return {
            "prompt_s": judged.metrics["mean_ttft"],
            "token_s": judged.metrics["mean_tpot"],
            "e2e_s": judged.metrics["makespan"],
        }

    found = measured(times)
    for name in ("prompt", "token", "e2e"):
        if found["error"] is None:
            found[f"{name}_error"] = found[f"{name}_s"] / trial[f"measured_{name}_s"] - 1
    # 64 prompts of 512 tokens in 0.8 s would be nine times the peak of two A100.
    found["plausible"] = bool(
        trial["measured_prompt_s"] > 1e-4 * trial["requests"] * trial["prompt"]
    )
    return found


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the mean errors; 003 (section 2.3) quotes 9 % for Vidur itself."""
    claims = []
    for cost_model in dict.fromkeys(row["cost_model"] for row in rows):
        for name, words in (("e2e", "end to end"), ("prompt", "prefill"), ("token", "decode")):
            errors = [
                abs(row[f"{name}_error"])
                for row in rows
                if row["cost_model"] == cost_model and row["plausible"] and row["error"] is None
            ]
            if errors:
                mean = float(np.mean(errors))
                claims.append(
                    Claim(
                        f"{cost_model}: mean error, {words} (most {max(errors):.1%})",
                        "<= 9 % (Vidur)",
                        f"{mean:.1%}",
                        mean <= 0.09,
                    )
                )
    return claims


EXPERIMENT = Experiment(
    name="infermax-validation",
    summary="cost models against Splitwise's measured prefill, decode and end-to-end times",
    paper="003, sections 2.3 and A.2; measurements of Splitwise (needs its perf_model.csv)",
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
        "prompt_s": "simulated prefill, likewise token_s and e2e_s",
        "prompt_error": "simulated over measured, less 1; likewise token_error and e2e_error",
        "plausible": "whether the measurement is within the devices' peaks",
    },
)
