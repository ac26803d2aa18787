"""What `solve` proves for total latency in seconds: ten draws of each kind, two methods.

    python benchmarks/exact_seconds.py [--row NAME]... [--draws K] [--model NAME] [--time-limit S]
        [--method NAME]... [--cpu] [--certify]

Prints a table of proved / drawn, the median of the gap of the rest, and the median and the largest
number of wall-clock and processor seconds: on a busy machine only the latter mean anything. Each
method runs alone and starts from the same plans, without the bounds that `solve` runs beside it. A
model that is too large counts as not proved, with a gap of 100 %. With ``--cpu`` the limit of
`labels`, which has one thread, is in processor seconds, as if the machine had nothing else to do.
With ``--certify`` the checker then proves what `labels` did: how many it took, and the median and
the largest ratio of its processor seconds to those of the search.

Requests of 100 to 1,500 prompt tokens arrive at random (exponential times between arrivals, to the
microsecond). ``kv-three`` has KV for three of the eight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import numpy as np

from optsched import Instance, Problem
from optsched.bounds.certificate import certify
from optsched.costs.load import load_cost_model
from optsched.optimize.formulations import Answer, Task, check_method, get
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.budget import work_time
from optsched.problem.errors import TooLargeError, UsageError

AMPLE = 100_000
MODELS = ("llama2-7b-a100-infermax", "llama2-7b-a100-vidur-fit")


class Row(NamedTuple):
    """n requests, the range of their outputs, and how many arrive a second (0: all at once)."""

    n: int
    shortest: int
    longest: int
    rate: float


ROWS = {
    "n8-short": Row(8, 3, 8, 8),
    "n12-short": Row(12, 3, 8, 8),
    "n12": Row(12, 10, 40, 5),
    "n16": Row(16, 10, 40, 5),
    "n20": Row(20, 10, 40, 5),
    "n8-overlap": Row(8, 10, 40, 40),
    "kv-three": Row(8, 3, 8, 0),
    "n10-long": Row(10, 50, 200, 2),
    "n30": Row(30, 10, 60, 3),
}


def draw(name: str, seed: int) -> Instance:
    """Return an instance of a row."""
    row, rng = ROWS[name], np.random.default_rng([48, list(ROWS).index(name), seed])
    arrival = np.zeros(row.n)
    if row.rate:
        arrival = np.round(np.cumsum(rng.exponential(1 / row.rate, row.n)), 6)

    prompt = rng.integers(100, 1501, row.n)
    output = rng.integers(row.shortest, row.longest + 1, row.n)
    peak = np.sort(prompt + output - 1)
    capacity = int(max(peak[-1], 3 * peak.mean())) if name == "kv-three" else AMPLE
    return Instance(
        arrival, prompt, output, capacity,
        time_unit="second", kv_accounting="cached", chunked_prefill=False,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", action="append", choices=ROWS)
    parser.add_argument("--method", action="append", choices=("labels", "cpsat", "search"))
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--certify", action="store_true")
    args = parser.parse_args()
    options = SolveOptions(args.time_limit, threads=args.threads)
    methods = args.method or ["cpsat", "labels"]
    if args.cpu:
        if methods != ["labels"]:
            parser.error("--cpu: expected --method labels; others have clocks of their own")

        work_time.now = time.process_time

    checks: list[tuple[bool, float]] = []

    def run(method: str, instance: Instance, model: str) -> tuple[bool, float, float, float]:
        """Return whether it is proved, the gap, and the seconds on the clock and of the cores."""
        task = Task(instance, load_cost_model(model), ("tel",))
        wall, cores = time.perf_counter(), time.process_time()
        try:
            answer = check_method(get("infermax"), method, task).run(task, options)
        except TooLargeError:
            answer = Answer(Status.NO_INCUMBENT)

        wall, cores = time.perf_counter() - wall, time.process_time() - cores
        if args.certify and answer.status == "optimal":
            begin = time.process_time()
            try:
                value = certify(instance, task.cost_model, "tel", answer.tree)["value"]
                taken = answer.objective - value / 10**12 < 1e-9
            except UsageError:
                taken = False

            checks.append((taken, (time.process_time() - begin) / cores))

        gap = 1.0
        if answer.objective and answer.bound is not None:
            gap = (answer.objective - answer.bound) / answer.objective

        return answer.status == "optimal", gap, wall, cores

    tiny = Problem("tiny-seconds", load_cost_model(MODELS[0])).instance
    for method in methods:
        run(method, tiny, MODELS[0])  # compiles

    checks.clear()
    print("model\trow\tmethod\tproved\tgap of the rest\twall s\tcore s\tcertified\tratio")
    for model in args.model or MODELS:
        for name in args.row or ROWS:
            for method in methods:
                found = [run(method, draw(name, seed), model) for seed in range(args.draws)]
                gaps = [gap for proved, gap, *_ in found if not proved]
                gap = f"{100 * statistics.median(gaps):.2f} %" if gaps else "-"
                times = (
                    f"{statistics.median(column):.2f} to {max(column):.2f}"
                    for column in ([one[k] for one in found] for k in (2, 3))
                )
                proved = f"{sum(one[0] for one in found)} of {len(found)}"
                ratios = [ratio for _, ratio in checks] or [0.0]
                ratio = f"{statistics.median(ratios):.2f} to {max(ratios):.2f}"
                certified = f"{sum(taken for taken, _ in checks)} of {len(checks)}"
                print(
                    model, name, method, proved, gap, *times, certified, ratio, sep="\t", flush=True
                )
                checks.clear()


if __name__ == "__main__":
    main()
