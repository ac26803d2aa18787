"""What is proved of a server with experts: docs/lab/cost-models.md, "Experts".

    python benchmarks/experts.py [--seconds SECONDS] [INSTANCE ...]

Instances are those of the library. Each objective has so many seconds (60 by default).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import optsched
from optsched import Problem, bound, verify

MODEL = "roofline:qwen3-30b-a3b,device=h100-80gb"
SLOS = {"slo_ttft": 0.1, "slo_tpot": 0.008}
GOALS = {"total latency": "tel", "mean TTFT": "mean_ttft", "p99 TTFT": "p99_ttft"}
GOALS |= {"makespan": "makespan", "late, 100 and 8 ms": "slo_attainment"}


def row(name: str, words: str, goal: str, seconds: float) -> str:
    """Return a line of the table: best known, bound, their quotient, and the certificate."""
    begin = time.process_time()
    problem = Problem(name, MODEL, goal, **(SLOS if goal == "slo_attainment" else {}))
    found = bound(problem, time_limit_s=seconds)
    spent = time.process_time() - begin
    if found.certificate is not None:  # a certificate of another value would not be accepted
        verify(problem, found.certificate)

    known, proved = found.value, found.bound
    # Of shares the parts that are late stand beside one another.
    known, proved = (1 - known, 1 - proved) if goal == "slo_attainment" else (known, proved)
    ratio = f"{known / proved:.2f}" if proved > 0 else "-"
    kept = "certificate" if found.certificate is not None else ""
    cells = name.removeprefix("library/"), words, f"{known:.4g}", f"{proved:.4g}", ratio, kept
    print(f"{name} {words}: {spent:.0f} s of processor time", file=sys.stderr, flush=True)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a table of instances and objectives, and what no rate reaches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("instances", nargs="*", default=["chat-x0.5", "chat-x2"])
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| | | best known | bound | quotient | |\n|---|---|---|---|---|---|")
    for one in asked.instances:
        name = f"library/{one}"
        for words, goal in GOALS.items():
            print(row(name, words, goal, asked.seconds), flush=True)

        problem = Problem(name, MODEL, **SLOS)
        reach = optsched.capacity(problem, ["vllm-v1"], attainment=0.99, time_limit_s=asked.seconds)
        words = "rate scale for 99 % in time"
        print(f"| {one} | {words} | {reach.value:.3g} | {reach.bound:.3g} "
              f"| {reach.bound / reach.value:.2f} | |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
