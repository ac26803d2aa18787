"""Hold the ramp relaxation against exhaustive search on as many tiny instances as you like.

    python benchmarks/tiny_instances.py --count 1000000

Each instance has 1 to 5 requests and is drawn from its own number, in turn with arrivals or none,
equal requests, and KV filled exactly (`tests/test_ramp.py`). Exhaustive search over starts, the
proof, its schedule and its certificate must agree. Proofs take four ways in turn, the last three of
which large instances take: as they are, by deletion, by targets and by enumeration. Every second
certificate is replayed by compiled code, the others in plain Python. The first contradiction ends
the run with its instance.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from brute_force import brute_force_tel
from readable_ramp import Plain
from test_ramp import certified, tiny_instance

from optsched.bounds.checker.parts import Rejected
from optsched.bounds.checker.ramp import compiled
from optsched.optimize.ramp.prove import prove_all
from optsched.optimize.ramp.tuning import MEASURED, Tuning

WAYS = (
    MEASURED,
    Tuning(large_nodes=0, close_gap=0.0, first_nodes=10),
    Tuning(budget=8, close_gap=0.0, first_nodes=3),
    Tuning(close_gap=1.0, first_nodes=3),
)
"""With each of these tiny proofs take another way."""


def contradiction(number: int) -> str:
    """Return what is wrong with the instance of a number, or an empty text."""
    rng = np.random.default_rng([11, number])
    instance = tiny_instance(rng, number, 5 if number % 8 == 0 else 4)
    optimum, _ = brute_force_tel(instance)
    replays = compiled if number // len(WAYS) % 2 else Plain
    proofs = prove_all(instance, seed=number, tuning=WAYS[number % len(WAYS)])
    found: dict[str, int | str] = {
        "bound": sum(p.bound for p in proofs),
        "schedule": sum(p.value for p in proofs),
    }
    try:
        found["certificate"] = certified(instance, proofs, replays)
    except Rejected as error:
        found["certificate"] = str(error)
    feasible = all(p.jobs.feasible(p.starts) for p in proofs)
    if feasible and set(found.values()) == {optimum}:
        return ""
    return f"{number}: optimum {optimum}, found {found}, feasible: {feasible}; {instance.to_dict()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first instance")
    args = parser.parse_args()
    begin = time.perf_counter()
    for done in range(args.count):
        wrong = contradiction(args.first + done)
        if wrong:
            print(wrong)
            return 1
        if (done + 1) % 1000 == 0 or done + 1 == args.count:
            took = time.perf_counter() - begin
            print(f"{done + 1} of {args.count} agree, {took:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
