"""How much faster an experiment is with two jobs: 400 proofs of Jaillet et al.'s model 1, n = 12.

    python benchmarks/experiment_jobs.py

Chunks of trials run with one job and with two in turn, so that what else the machine does falls
on both. Beside the seconds of the clock stand the seconds of CPU of all processes and the share
of the time that the jobs were inside trials; the rest is starting processes, waiting and storing.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from optsched.experiments.runner import run_experiment

NAME = "jaillet-model-1"


def measure(jobs: int, first: int, count: int, n: int, out: Path) -> tuple[float, float, float]:
    """Return the seconds of the clock, of CPU, and inside trials."""

    def cpu() -> float:
        return sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    wall, used = time.perf_counter(), cpu()
    outcome = run_experiment(
        NAME,
        {"n": n, "time_limit": 600},
        seed=first,
        trials=count,
        jobs=jobs,
        isolate=True,
        out=out,
    )
    elapsed = time.perf_counter() - wall
    assert all(row["proved"] for row in outcome.rows), "a time limit would hide the difference"
    return elapsed, cpu() - used, sum(outcome.wall_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--n", type=int, default=12)
    args = parser.parse_args()
    count = args.trials // args.chunks
    total = {1: [0.0, 0.0, 0.0], 2: [0.0, 0.0, 0.0]}
    with tempfile.TemporaryDirectory() as folder:
        measure(1, 10**6, 2, args.n, Path(folder) / "compile")
        print("| seeds | jobs | clock s | CPU s | inside trials | load average |")
        print("|---|---|---|---|---|---|")
        for k in range(args.chunks):
            same = []
            for jobs in (1, 2) if k % 2 == 0 else (2, 1):
                out = Path(folder) / f"{k}-{jobs}"
                seconds = measure(jobs, k * count, count, args.n, out)
                same.append((out / "results.csv").read_bytes())
                total[jobs] = [a + b for a, b in zip(total[jobs], seconds, strict=True)]
                show(f"{k * count}-{(k + 1) * count - 1}", jobs, seconds)
            assert same[0] == same[1]
    for jobs in (1, 2):
        show("all", jobs, total[jobs])
    print(f"\nTwo jobs are {total[1][0] / total[2][0]:.2f} times as fast; {os.cpu_count()} cores.")


def show(seeds: str, jobs: int, seconds: tuple[float, ...] | list[float]) -> None:
    wall, used, inside = seconds
    share = inside / (jobs * wall)
    load = os.getloadavg()[0]
    print(f"| {seeds} | {jobs} | {wall:.1f} | {used:.1f} | {share:.1%} | {load:.1f} |", flush=True)


if __name__ == "__main__":
    main()
