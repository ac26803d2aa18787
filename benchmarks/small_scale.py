"""Proofs of optimality and certified gaps at small scale, as tables (`docs/lab/small-scale.md`).

    python benchmarks/small_scale.py proofs [--seeds 0 1 ...]
    python benchmarks/small_scale.py gaps --limits 60 300 [--seeds 0 1 ...]
    python benchmarks/small_scale.py checks --limits 60 [--seeds 0 1 ...]

`checks` has the bounds of `gaps`, and the CPU time in which their certificates are checked.
One process, ``--threads`` threads (2). The clock, for limits and results, is wall time. With
``--cpu`` it is the CPU time of the process over the number of threads, for machines that others
use: it says what an idle machine would take. A run of ``gaps`` lasts for the longest
limit, and what it knew at the others is read from its progress. A first small solve compiles (or
loads) the kernels and is not counted; ``--jsonl FILE`` appends a line per run, and
``--keep FOLDER`` writes the certificates.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from optsched.bounds.checker import check_certificate
from optsched.bounds.checker.parts import Rejected
from optsched.files.strict_json import write_json
from optsched.optimize.solve import solve
from optsched.workloads.generate import generate

PROOFS = (
    # generator, n, seconds that 18 of 20 instances may take
    ("jaillet-model-1", 12, 1.0),
    ("jaillet-model-1", 20, 5.0),
    ("jaillet-model-1", 30, 60.0),
    ("jaillet-model-2", 12, 5.0),
    ("jaillet-model-2", 20, 60.0),
)
MODELS = ("jaillet-model-1", "jaillet-model-2")
SIZES = tuple(range(40, 61))


class ClockTimer(threading.Thread):
    """A `threading.Timer` by `time.perf_counter`, which ``--cpu`` replaces."""

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        super().__init__()
        self._end, self._function = time.perf_counter() + interval, function
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        while not self._cancelled.wait(0.05):
            if time.perf_counter() >= self._end:
                self._function()
                return


def run(
    name: str, n: int, seed: int, limit: float, threads: int, check: bool, keep: str | None = None
) -> tuple[dict[str, Any], list[tuple[float, Any, Any]]]:
    """Solve one instance, at most ``limit`` seconds of the clock.

    Returns a record, and (seconds, bound, objective) whenever either was reported.
    """
    instance = generate(name, seed=seed, n=n)
    begin, used = time.perf_counter(), time.process_time()
    known: list[tuple[float, Any, Any]] = []

    def spent() -> float:
        return time.perf_counter() - begin

    result = solve(
        instance,
        method="ramp",
        time_limit_s=limit,
        threads=threads,
        progress=lambda state: known.append((spent(), state.bound, state.incumbent)),
    )
    row = {
        "model": name,
        "n": n,
        "seed": seed,
        "kv_capacity": instance.kv_capacity,
        "method": "ramp",
        "limit_s": limit,
        "threads": threads,
        "status": result.status.value,
        "bound": result.bound,
        "objective": result.value,
        "gap": result.gap,
        "clock_s": round(time.perf_counter() - begin, 3),
        "cpu_s": round(time.process_time() - used, 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    known.append((0.0 if not known else known[-1][0], result.bound, result.value))
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        write_json(result.certificate, Path(keep) / f"{name}-{n}-{seed}.json")
    used, before = time.process_time(), os.times().system
    try:
        row["checked"] = check_certificate(instance, result.certificate) if check else None
    except Rejected as error:
        row["checked"] = str(error)
    row["check_cpu_s"] = round(time.process_time() - used, 3)
    row["check_system_s"] = round(os.times().system - before, 2)
    return row, known


def gap_at(known: list[tuple[float, Any, Any]], limit: float) -> float:
    """Return the relative gap known within ``limit`` seconds, 1 where nothing was."""
    bound, value = None, None
    for seconds, low, high in known:
        if seconds <= limit:
            bound, value = low if low is not None else bound, high if high is not None else value
    return 1.0 if bound is None or value is None else (value - bound) / value


def proofs(args: argparse.Namespace) -> None:
    print("| model | n | target s | proved within | median s | 18th of 20 s | worst s | peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, n, target in PROOFS:
        if name not in args.models or (args.sizes and n not in args.sizes):
            continue
        rows = [record(args, [target], name, n, seed, target)[0] for seed in args.seeds]
        times = sorted(r["clock_s"] if r["status"] == "optimal" else float("inf") for r in rows)
        at = max(0, -(-9 * len(times) // 10) - 1)
        print(
            f"| {name} | {n} | {target:g} | {sum(t < float('inf') for t in times)} of {len(rows)} "
            f"| {times[len(times) // 2]:.2f} | {times[at]:.2f} | {times[-1]:.2f} "
            f"| {rows[-1]['peak_mib']} |",
            flush=True,
        )


def gaps(args: argparse.Namespace) -> None:
    print("| model | limit s | instances | mean gap | worst gap | proved |")
    print("|---|---|---|---|---|---|")
    longest = max(args.limits)
    for name in args.models:
        runs = [
            record(args, args.limits, name, SIZES[(7 * seed) % len(SIZES)], seed, longest)
            for seed in args.seeds
        ]
        for limit in args.limits:
            values = [at[limit] for _, at in runs]
            print(
                f"| {name} | {limit:g} | {len(runs)} "
                f"| {100 * sum(values) / len(values):.2f} % | {100 * max(values):.2f} % "
                f"| {sum(v == 0 for v in values)} |",
                flush=True,
            )


def checks(args: argparse.Namespace) -> None:
    print("| model | n | seed | bound | gap | checked | CPU s of the check | in the kernel |")
    print("|---|---|---|---|---|---|---|---|")
    longest = max(args.limits)
    for name in args.models:
        for seed in args.seeds:
            size = SIZES[(7 * seed) % len(SIZES)]
            row, at = record(args, [longest], name, size, seed, longest)
            print(
                f"| {name} | {size} | {seed} | {row['bound']} | {100 * at[longest]:.2f} % "
                f"| {row['checked']} | {row['check_cpu_s']:.1f} | {row['check_system_s']:.1f} |",
                flush=True,
            )


def record(
    args: argparse.Namespace, limits: list[float], *what: Any
) -> tuple[dict[str, Any], dict[float, float]]:
    row, known = run(*what, args.threads, args.table == "checks", args.keep)
    at = {limit: gap_at(known, limit) for limit in limits}
    if args.jsonl:
        with Path(args.jsonl).open("a") as file:
            file.write(json.dumps(row | {"gap_at": at}) + "\n")
    return row, at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=("proofs", "gaps", "checks"))
    parser.add_argument("--seeds", type=int, nargs="+", default=range(20))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--limits", type=float, nargs="+", default=[60.0])
    parser.add_argument("--sizes", type=int, nargs="+", help="of the proofs: only these n")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds per thread as the clock")
    parser.add_argument("--jsonl", help="append a line per run to this file")
    parser.add_argument("--keep", help="write the certificates into this folder")
    args = parser.parse_args()
    if args.cpu:
        time.perf_counter = lambda: time.process_time() / args.threads
        threading.Timer = ClockTimer  # type: ignore[misc, assignment]
    names = ("numba", "numpy", "highspy", "ortools")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"Python {platform.python_version()}, {versions}; {platform.machine()}", end="")
    print(f", {args.threads} threads\n")
    for name in MODELS:
        run(name, 14, 99, 600.0, args.threads, args.table == "checks")
    {"proofs": proofs, "gaps": gaps, "checks": checks}[args.table](args)


if __name__ == "__main__":
    main()
