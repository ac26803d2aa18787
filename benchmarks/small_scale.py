"""Proofs of optimality and certified gaps at small scale, as tables (`docs/small-scale.md`).

    python benchmarks/small_scale.py proofs [--instances 20]
    python benchmarks/small_scale.py gaps --limits 60 300 [--instances 20]
    python benchmarks/small_scale.py rivals --limits 60 [--instances 20]

One process, one thread. Both wall and CPU seconds are printed: on a machine that others use, the
CPU seconds say what an idle one would take, and ``--cpu`` makes them the limit. A first small
solve compiles (or loads) the kernels and is not counted; ``--jsonl FILE`` appends a line per run.
"""

from __future__ import annotations

import argparse
import json
import platform
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from optsched.generate import generate
from optsched.solve import solve

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


def run(name: str, n: int, seed: int, method: str, limit: float, cpu: bool) -> dict[str, Any]:
    """Solve one instance by one method, at most ``limit`` seconds of wall or CPU time."""
    instance = generate(name, seed=seed, n=n)
    stop, done = threading.Event(), threading.Event()
    wall, used = time.perf_counter(), time.process_time()

    def watch() -> None:
        while not done.wait(0.02):
            if time.process_time() - used >= limit:
                stop.set()

    if cpu:
        threading.Thread(target=watch, daemon=True).start()
    result = solve(
        instance,
        method=method,
        time_limit_s=60 * limit if cpu else limit,
        threads=1,
        warm_start="mc-sf" if method in ("highs", "cpsat") else None,
        stop=stop,
    )
    done.set()
    return {
        "model": name,
        "n": n,
        "seed": seed,
        "kv_capacity": instance.kv_capacity,
        "method": method,
        "limit_s": limit,
        "status": result.status.value,
        "bound": result.bound,
        "objective": result.objective,
        "gap": result.gap,
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - used, 3),
    }


def proofs(args: argparse.Namespace) -> None:
    clock = "cpu_s" if args.cpu else "wall_s"
    print("| model | n | target s | proved within | median s | 18th of 20 s | worst s |")
    print("|---|---|---|---|---|---|---|")
    for name, n, target in PROOFS:
        rows = [record(args, name, n, seed, "ramp", 3 * target) for seed in range(args.instances)]
        times = sorted(r[clock] if r["status"] == "optimal" else float("inf") for r in rows)
        count = sum(t <= target for t in times)
        at = max(0, -(-9 * len(times) // 10) - 1)
        print(
            f"| {name} | {n} | {target:g} | {count} of {len(rows)} | {times[len(times) // 2]:.2f} "
            f"| {times[at]:.2f} | {times[-1]:.2f} |",
            flush=True,
        )


def gaps(args: argparse.Namespace, methods: tuple[str, ...] = ("ramp",)) -> None:
    print("| model | method | limit s | instances | mean gap | worst gap | proved |")
    print("|---|---|---|---|---|---|---|")
    for name in MODELS:
        for limit in args.limits:
            for method in methods:
                rows = [
                    record(args, name, SIZES[(7 * seed) % len(SIZES)], seed, method, limit)
                    for seed in range(args.instances)
                ]
                values = [1.0 if r["gap"] is None else r["gap"] for r in rows]
                proved = sum(r["status"] == "optimal" for r in rows)
                print(
                    f"| {name} | {method} | {limit:g} | {len(rows)} "
                    f"| {100 * sum(values) / len(values):.2f} % | {100 * max(values):.2f} % "
                    f"| {proved} |",
                    flush=True,
                )


def record(args: argparse.Namespace, *what: Any) -> dict[str, Any]:
    row = run(*what, args.cpu)
    if args.jsonl:
        with Path(args.jsonl).open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=("proofs", "gaps", "rivals"))
    parser.add_argument("--instances", type=int, default=20, help="per row; seeds 0, 1, ...")
    parser.add_argument("--limits", type=float, nargs="+", default=[60.0])
    parser.add_argument("--cpu", action="store_true", help="limits in CPU seconds")
    parser.add_argument("--jsonl", help="append a line per run to this file")
    args = parser.parse_args()
    names = ("numba", "numpy", "highspy", "ortools")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"Python {platform.python_version()}, {versions}; {platform.machine()}, 1 thread\n")
    for name in MODELS:
        solve(generate(name, seed=99, n=8), method="ramp", time_limit_s=600)
    if args.table == "proofs":
        proofs(args)
    else:
        gaps(args, ("ramp", "cpsat", "highs") if args.table == "rivals" else ("ramp",))


if __name__ == "__main__":
    main()
