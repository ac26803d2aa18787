"""What each method of infermax proves: a table of proved / gap / time, one row per case and method.

    python benchmarks/infermax_scaling.py [--case NAME]... [--method NAME]... [--time-limit S]

Wall and processor seconds are printed: on a busy machine only the latter mean anything.

Cases are B x O at I = prompt tokens, under M = max(2 I, I + O - 1) unless stated; ``mix-k`` are 10
requests of 5 random classes, ``distinct-k`` 8 different requests with O <= 8. Cost model
``llama2-7b-a100-infermax-paper``, makespan, cached KV.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from optsched import Instance, Problem
from optsched.costs.load import load_cost_model
from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations import Task, check_method, get
from optsched.optimize.solvers.base import SolveOptions
from optsched.problem.errors import OptschedError

METHODS = ("labels", "cpsat", "pulp-bigm")


def fixed(requests: int, output: int, prompt: int, capacity: int | None = None) -> Instance:
    room = max(2 * prompt, prompt + output - 1) if capacity is None else capacity
    return Instance(
        np.zeros(requests),
        np.full(requests, prompt),
        np.full(requests, output),
        room,
        time_unit="second",
        kv_accounting="cached",
    )


def mixed(seed: int, classes: int, requests: int) -> Instance:
    """Return random classes, s <= 32 and o <= 8, M a third of all peaks together."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(1, 33, classes), rng.integers(1, 9, classes)
    member = np.concatenate([np.arange(classes), rng.integers(0, classes, requests - classes)])
    prompt, output = prompt[member], output[member]
    peak = prompt + output - 1
    room = int(max(peak.max(), peak.sum() // 3))
    return Instance(
        np.zeros(requests), prompt, output, room, time_unit="second", kv_accounting="cached"
    )


def cases() -> dict[str, Instance]:
    found = {f"paper-i{2**k}": fixed(4, 4, 2**k) for k in range(11)}
    found |= {
        "3x3-i1": fixed(3, 3, 1),
        "3x3-i64": fixed(3, 3, 64),
        "3x4-i1": fixed(3, 4, 1),
        "8x8-i8": fixed(8, 8, 8),
        "8x8-i64": fixed(8, 8, 64),
        "16x8-i64-half": fixed(16, 8, 64, 16 * 71 // 2),
        "32x4-i64": fixed(32, 4, 64),
        "64x4-i64": fixed(64, 4, 64),
        "8x16-i64": fixed(8, 16, 64),
        "16x16-i64": fixed(16, 16, 64),
    }
    found |= {f"mix-{k}": mixed(k, 5, 10) for k in range(3)}
    found |= {"8x16-i8": fixed(8, 16, 8), "16x8-i1": fixed(16, 8, 1)}
    found |= {f"distinct-{k}": mixed(k, 8, 8) for k in range(3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", help="a name, or the beginning of names")
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1, help="the median time is printed")
    arguments = parser.parse_args()
    cost = load_cost_model("llama2-7b-a100-infermax-paper")
    print(
        "| case | M | method | status | makespan ms | bound ms | gap | evictions | wall s | cpu s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, instance in cases().items():
        if arguments.case and not any(name.startswith(case) for case in arguments.case):
            continue
        for method in arguments.method or METHODS:
            task = Task(instance, cost, ("makespan",))
            options = SolveOptions(
                time_limit_s=arguments.time_limit, threads=arguments.threads, seed=arguments.seed
            )
            walls, cpus = [], []
            try:
                for _ in range(arguments.repeats):
                    begin, cpu = time.perf_counter(), time.process_time()
                    answer = check_method(get("infermax"), method, task).run(task, options)
                    walls.append(time.perf_counter() - begin)
                    cpus.append(time.process_time() - cpu)
            except OptschedError as error:
                print(f"| {name} | {instance.kv_capacity} | {method} | {error} |", flush=True)
                continue
            value = evictions = gap = "-"
            if answer.schedule is not None and answer.objective is not None:
                judged = evaluate(Problem(instance, cost), answer.schedule).metrics
                value, evictions = f"{1000 * answer.objective:.6f}", str(judged["evictions"])
                if answer.bound is not None:
                    gap = f"{100 * (1 - answer.bound / answer.objective):.2f} %"
            bound = "-" if answer.bound is None else f"{1000 * answer.bound:.6f}"
            print(
                f"| {name} | {instance.kv_capacity} | {method} | {answer.status} | {value} | "
                f"{bound} | {gap} | {evictions} | {np.median(walls):.2f} | "
                f"{np.median(cpus):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
