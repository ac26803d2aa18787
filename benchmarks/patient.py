"""Policies that pause prefills beside others: on traces, and on draws that none was tuned on.

    OPTSCHED_DATA=DIR python benchmarks/patient.py > table.md
    OPTSCHED_DATA=DIR python benchmarks/patient.py --only code

Each line is printed as soon as it is known: mean and 99th percentile of latency and of TTFT, in
seconds.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from studies.trace_policies import case

import optsched
from optsched import Instance

MODEL = "llama2-7b-a100-infermax"
POLICIES = ("vllm-v1", "hrrn", "least-work", "spf", "patient")
POLICIES += ("spf-work", "patient-work", "patient-work:predictor=noisy,predictor.mae=HALF")
"""HALF stands for half of the mean output: what predictions are wrong by."""
AZURE = {
    "code": ("AzureLLMInferenceTrace_code.csv", (0.5, 1.0, 2.0)),
    "conversation": ("AzureLLMInferenceTrace_conv.csv", (0.5, 0.75, 1.0, 2.0)),
}
DRAWS = {
    # Lengths of no trace at hand, at a load that was not looked at when the policies were made.
    "draw: short prompts, long outputs": {
        **{"rate": 3.2, "prompt_mean": 300.0, "prompt_median": 180.0, "prompt_max": 4000},
        **{"output_mean": 420.0, "output_median": 300.0, "output_max": 2000},
    },
    "draw: long prompts": {
        **{"rate": 0.32, "prompt_mean": 9000.0, "prompt_median": 5000.0, "prompt_max": 60000},
        **{"output_mean": 250.0, "output_median": 150.0, "output_max": 1500},
    },
    "draw: code with longer answers": {
        **{"rate": 2.6, "prompt_mean": 1800.0, "prompt_median": 1300.0, "prompt_max": 12000},
        **{"output_mean": 90.0, "output_median": 40.0, "output_max": 2000},
    },
}


def instances() -> Iterator[tuple[str, Instance]]:
    """Yield names and instances."""
    data = Path(os.environ["OPTSCHED_DATA"])
    for name, (file, rates) in AZURE.items():
        for rate in rates:
            yield (
                f"{name} x{rate:g}",
                optsched.read_trace(
                    "azure", data / "azure" / file, kv_capacity=100_000, rate_scale=rate
                ),
            )

    for load in (0.5, 0.9):
        yield f"mooncake, load {load:g}", case("mooncake", load, 2000, MODEL)[0]

    for seed, (name, values) in enumerate(DRAWS.items(), 901):
        yield name, optsched.generate("lognormal", seed=seed, n=2000, kv_capacity=100_000, **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="instances whose name has this in it")
    only = parser.parse_args().only
    warnings.simplefilter("ignore", UserWarning)
    print("| instance | policy | mean latency | p99 | mean TTFT | p99 |\n|---|---|---|---|---|---|")
    for name, instance in instances():
        half = f"{0.5 * instance.output_tokens.mean():.0f}"
        for policy in [p.replace("HALF", half) for p in POLICIES] if only in name else ():
            schedule = optsched.run(optsched.Problem(instance, MODEL), policy).schedule
            latency, ttft = (
                getattr(optsched.evaluate(optsched.Problem(instance, MODEL), schedule), key)
                for key in ("latency", "ttft")
            )
            cells = [f(column) for column in (latency, ttft) for f in (np.mean, p99)]
            text = " | ".join(f"{cell:.2f}" for cell in cells)
            print(f"| {name} | `{policy}` | {text} |", flush=True)


def p99(column: np.ndarray) -> float:
    """Return the 99th percentile."""
    return float(np.percentile(column, 99))


if __name__ == "__main__":
    main()
