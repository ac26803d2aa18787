"""General solvers beside the ramp relaxation: proved, gap and time (`docs/lab/small-scale.md`).

    python benchmarks/rivals.py [--sizes 12 20 30 47] [--limit 60] [--seeds 0] [--jsonl FILE]

All get the same schedule to start from, one thread and the same limit. Each has its own model:

- `ramp`: the reverse-time ramp relaxation;
- `cpsat`: a start per request and a staircase of intervals;
- `highs`, `scip`: the time-indexed integer program;
- `didppy`: a dynamic program over the requests left, by complete anytime beam search
  (`tests/didp.py`).

didppy and PySCIPOpt are not dependencies (`pip install optsched[rivals]`); what is not installed is
left out. A bound is rounded up, since the optimum is an integer, and never below the quick
bound of the package (`floor`). Schedules are judged.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from optsched import Instance, evaluate, generate, solve
from optsched.analysis.ratio.worst import quick_optimum
from optsched.bounds import lower_bound
from optsched.optimize.formulations.rounds.integer_program import (
    linear_model,
    program,
    read_starts,
    start_values,
)
from optsched.problem.schedule import Schedule, from_starts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

MODELS = ("jaillet-model-1", "jaillet-model-2")
Known = tuple[float | None, float | None]
"""Bound and value after a run."""


def value_of(instance: Instance, schedule: Schedule) -> int:
    return int(evaluate(instance, schedule).metrics["tel"] or 0)


def by_package(method: str) -> Callable[[Instance, Schedule, float], Known]:
    def run(instance: Instance, start: Schedule, limit: float) -> Known:
        found = solve(instance, method=method, time_limit_s=limit, threads=1, warm_start=start)
        return found.bound, found.value

    return run


def by_didppy(instance: Instance, start: Schedule, limit: float) -> Known:
    import didp

    known = value_of(instance, start)
    found = didp.solve(instance, known=known, time_limit_s=limit)
    if found.starts is None:
        return found.bound, known
    return found.bound, value_of(instance, from_starts(np.array(found.starts), instance))


def by_scip(instance: Instance, start: Schedule, limit: float) -> Known:
    import pyscipopt

    begin = time.perf_counter()
    prog = program(instance, warm_start=start)
    arrays = linear_model(prog)
    model = pyscipopt.Model()
    model.hideOutput()
    kinds = np.where(arrays.integrality > 0, "B", "C").tolist()
    columns = [
        model.addVar(vtype=kind, lb=low, ub=high, obj=cost)
        for kind, low, high, cost in zip(
            kinds, arrays.lower.tolist(), arrays.upper.tolist(), arrays.cost.tolist(), strict=True
        )
    ]
    of = np.repeat(np.arange(arrays.columns), np.diff(arrays.start))
    order = np.argsort(arrays.index, kind="stable")
    ends = np.cumsum(np.bincount(arrays.index, minlength=arrays.rows))
    for row, (low, high) in enumerate(zip(arrays.row_lower, arrays.row_upper, strict=True)):
        entries = order[ends[row - 1] if row else 0 : ends[row]]
        total = pyscipopt.quicksum(float(arrays.value[e]) * columns[of[e]] for e in entries)
        if low == high:
            model.addCons(total == float(high))
        elif high < math.inf:
            model.addCons(total <= float(high))
        if low != high and low > -math.inf:
            model.addCons(total >= float(low))
    given = model.createSol()
    for column, x in zip(columns, start_values(prog, arrays).tolist(), strict=True):
        model.setSolVal(given, column, x)
    model.addSol(given)
    if arrays.integral_objective:
        model.setObjIntegral()
    model.setParam("limits/time", max(0.1, limit - (time.perf_counter() - begin)))
    model.setParam("parallel/maxnthreads", 1)
    model.optimize()
    best = model.getBestSol()
    values = np.array([model.getSolVal(best, column) for column in columns])
    value = value_of(instance, from_starts(read_starts(prog, values) + prog.data.shift, instance))
    bound = model.getDualbound()
    if abs(bound) >= model.infinity():  # its first relaxation was not solved
        return None, value
    return min(float(value), math.ceil(bound - 1e-6)), value


METHODS: dict[str, tuple[str, Callable[[Instance, Schedule, float], Known]]] = {
    "ramp": ("numba", by_package("ramp")),
    "cpsat": ("ortools", by_package("cpsat")),
    "highs": ("highspy", by_package("highs")),
    "scip": ("pyscipopt", by_scip),
    "didppy": ("didppy", by_didppy),
}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=(12, 20, 30, 47))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per run")
    parser.add_argument("--jsonl", help="append a line per run to this file")
    args = parser.parse_args()
    found = {package: installed(package) for package, _ in METHODS.values()}
    versions = ", ".join(
        f"{package} {number or 'not installed'}" for package, number in found.items()
    )
    print(f"Python {platform.python_version()}, {versions}; {platform.machine()}, one thread\n")
    methods = [m for m in args.methods if found[METHODS[m][0]] is not None]
    for name in MODELS:  # compiles, or loads what is compiled
        solve(generate(name, seed=99, n=8), method="ramp", time_limit_s=600)
    print("| model | n | seed | start | floor | method | bound | schedule | gap | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in args.models:
        for n in args.sizes:
            for seed in args.seeds:
                instance = generate(model, seed=seed, n=n)
                start = from_starts(quick_optimum(instance)[1], instance)
                for method in methods:
                    row = measured(instance, start, method, args.limit)
                    show({"model": model[-1], "n": n, "seed": seed, **row}, args.jsonl)


def measured(instance: Instance, start: Schedule, method: str, limit: float) -> dict[str, Any]:
    begin = time.perf_counter()
    bound, value = METHODS[method][1](instance, start, limit)
    seconds = time.perf_counter() - begin
    floor = int(lower_bound(instance)[0] or 0)
    bound = floor if bound is None else max(floor, bound)
    return {
        "start": value_of(instance, start), "floor": floor, "method": method, "bound": bound,
        "schedule": value, "gap": None if value is None else (value - bound) / value,
        "seconds": round(seconds, 2),
    }  # fmt: skip


def show(row: dict[str, Any], file: str | None) -> None:
    gap = "none" if row["gap"] is None else "proved" if row["gap"] == 0 else f"{row['gap']:.2%}"
    values = [f"{x:g}" if isinstance(x, float) else str(x) for x in row.values()]
    values[-2] = gap
    print(f"| {' | '.join(values)} |", flush=True)
    if file is not None:
        with Path(file).open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
