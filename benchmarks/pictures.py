"""Time a picture, a trace and a report of the whole Azure conversation trace 2023.

    OPTSCHED_DATA=FOLDER python benchmarks/pictures.py

FOLDER holds azure/AzureLLMInferenceTrace_conv.csv. Every command runs in a process of its own,
reading of files included; the second run counts, because the first may compile.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "llama2-7b-a100-infermax"
POLICIES = ("vllm", "sarathi", "fcfs", "mc-sf")


def run(*words: str) -> tuple[float, float]:
    """Run a command of optsched; return its wall time and its processor time."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "optsched", *words], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begin, spent


def main() -> None:
    source = Path(os.environ["OPTSCHED_DATA"]) / "azure" / "AzureLLMInferenceTrace_conv.csv"
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        trace, comparison = str(folder / "trace.json"), str(folder / "comparison.json")
        schedule = str(folder / "schedules" / "vllm.json")
        run("import", "azure", str(source), "-o", trace)
        run(
            "compare", trace, "--cost-model", MODEL, "--no-bound",
            *(word for policy in POLICIES for word in ("--policy", policy)),
            "--schedules-out", str(folder / "schedules"), "--json", comparison,
        )  # fmt: skip
        plot = ("plot", schedule, "--instance", trace)
        commands = {
            "gantt.png": plot,
            "states.png": (*plot, "--kind", "states"),
            "kv.png": (*plot, "--kind", "kv"),
            "batches.png": (*plot, "--kind", "batches"),
            "ttft.png": ("plot", comparison, "--instance", trace, "--kind", "ttft"),
            "trace.json.gz": ("trace", trace, schedule),
            "one.html": ("report", trace, schedule),
            "four.html": ("report", trace, comparison),
        }
        print(f"{'file':15}{'wall s':>8}{'cpu s':>8}{'MB':>8}")
        for name, words in commands.items():
            out = folder / name
            for _ in range(2):
                wall, spent = run(*words, "-o", str(out))
            print(f"{name:15}{wall:8.2f}{spent:8.2f}{out.stat().st_size / 1e6:8.2f}")


if __name__ == "__main__":
    main()
