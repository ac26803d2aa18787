"""Bounds and schedules at trace scale, as a table.

    python benchmarks/trace_scale.py [--seeds 0,1,2,3,4] [--time-limit 120] [--large] [-o FILE]

10,000 requests, M = 16,492, lognormal lengths, everything in rounds. ``shipped`` draws lengths as
`generate lognormal` does, whose clipped means are the published ones; ``plain`` draws from the
lognormal of that mean and median and clips, which loses 3 to 15 % of the mean, and with it load;
``truncated`` draws again what would be clipped (means of about 32.5 and 79.8).
"""

from __future__ import annotations

import argparse
import math
import platform
import resource
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from optsched.bounds.certificate import verify_certificate
from optsched.judge.evaluate import evaluate
from optsched.optimize.search.anytime import explore
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate

TARGETS = {0.0: 0.7, 4.0: 2.5, 2.0: 5.0, 1.0: 0.005}
"""Arrivals per round (0: all at 0) and the gap aimed at, in percent."""


def instance_of(lengths: str, rate: float, seed: int, n: int) -> Instance:
    if lengths == "shipped":
        if rate == 0:
            return generate("lognormal", seed=seed, n=n, arrivals="all-at-once", time_unit="round")
        return generate("lognormal", seed=seed, n=n, rate=rate, time_unit="round")
    rng = np.random.default_rng(seed)
    columns = []
    for mean, median, longest in ((40.62, 11.0, 468), (85.32, 45.0, 883)):
        sigma = math.sqrt(2 * math.log(mean / median))
        drawn = np.exp(math.log(median) + sigma * rng.standard_normal(n))
        if lengths == "truncated":
            while (out := (drawn < 0.5) | (drawn >= longest + 0.5)).any():
                again = rng.standard_normal(int(out.sum()))
                drawn[out] = np.exp(math.log(median) + sigma * again)
        columns.append(np.clip(np.rint(drawn), 1, longest).astype(np.int64))
    arrival = np.zeros(n) if rate == 0 else np.cumsum(rng.exponential(1 / rate, size=n))
    return Instance(np.floor(arrival).astype(np.int64), *columns, kv_capacity=16_492)


def row(lengths: str, rate: float, seed: int, n: int, limit: float, search: bool = True) -> str:
    instance = instance_of(lengths, rate, seed, n)
    wall, cpu = time.perf_counter(), time.process_time()
    found = explore(instance, Budget(limit), seed=seed, search=search)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gap, steps = "", ""
    if found.schedule is not None:
        tel = evaluate(instance, found.schedule).metrics["tel"]
        assert tel == found.objective
        gap = f"{100 * (tel - found.bound) / tel:.4f}"
        steps = f"{found.steps / 1e6:.1f}"
    certificate = found.certificate()
    begin = time.perf_counter()
    assert verify_certificate(instance, certificate) == found.proved
    verified = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    target = f"{TARGETS[rate]:g}" if search else ""
    arrivals = "all at 0" if rate == 0 else f"{rate:g} per round"
    return (
        f"| {lengths} | {n} | {arrivals} | {seed} | {found.objective or ''} | {found.bound} "
        f"| {gap} | {target} | {found.first_bound_s:.2f} | {found.dual_s:.0f} | {wall:.0f} "
        f"| {cpu:.0f} | {steps} | {verified:.1f} | {peak:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--lengths", default="shipped,plain")
    parser.add_argument("--rates", default="0,4,2,1")
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--cpu-clock", action="store_true", help="limits and times in CPU time")
    parser.add_argument("--large", action="store_true", help="100,000 requests, only the bound")
    parser.add_argument("-o", "--out", default=None)
    options = parser.parse_args()
    if options.cpu_clock:
        # One thread: on a machine shared with others, CPU time is what an idle one would take.
        time.perf_counter = time.process_time
    # Compile first: it happens once per installation.
    explore(instance_of("shipped", 4.0, 0, 200), Budget(3.0))
    lines = [
        f"{platform.machine()}, Python {platform.python_version()}, numpy {version('numpy')}, "
        f"numba {version('numba')}; one thread"
        + (", all times in CPU time" if options.cpu_clock else ""),
        "",
        "| lengths | n | arrivals | seed | schedule | bound | gap % | target % | first bound s "
        "| dual until s | wall s | CPU s | steps 10^6 | verified s | GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for lengths in options.lengths.split(","):
        for rate in map(float, options.rates.split(",")):
            for seed in map(int, options.seeds.split(",")):
                if options.large:
                    lines.append(row(lengths, rate, seed, 100_000, 60.0, search=False))
                else:
                    lines.append(row(lengths, rate, seed, 10_000, options.time_limit))
                print(lines[-1], flush=True)
    if options.out is not None:
        Path(options.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
