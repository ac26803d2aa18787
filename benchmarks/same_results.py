"""Does another commit give the same results? Records them all, and compares two records.

    $ python benchmarks/same_results.py record before.json          # in the one checkout
    $ python benchmarks/same_results.py record after.json           # in the other
    $ python benchmarks/same_results.py compare before.json after.json

Recorded, over the shipped instances and generated ones in rounds and seconds: every policy's
schedule (a digest of its decisions) and metrics, every bound that needs no time limit, the proofs
of every exact method on the small instances, and the shipped certificates' verdicts. Everything
goes through what stays the same from version to version: the command line and `optsched`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

import optsched
from optsched.cli import app
from optsched.policies import list_policies

COST = "llama2-7b-a100-infermax"
ROOT = Path(__file__).resolve().parent.parent
SPECS = (
    "mc-sf:margin=3",
    "least-work:max_running=4",
    "sarathi:eviction_free=true",
    "vllm:max_running=3",
    "rank-output:eviction_free=true",
    "isrtf:window=3,batch_size=2,workers=2",
    "elis-fcfs:window=5,batch_size=3,workers=3",
    "trail:c=0.5,refine=false",
    "alpha-beta:alpha=0.1,beta=0.5",
    "mc-sf:predictor=noisy,predictor.mae=4",
    "a-min:make_room=true",
)
BOUNDS = ("srpt", "work", "prefill-work", "work-makespan")
SMALL, SHORT = 6, 200
"""Requests, and output tokens of all of them, up to which every exact method proves its optimum."""


def instances() -> Iterator[optsched.Instance]:
    """Yield the shipped instances and generated ones, none of which needs a trace."""
    for path in sorted((ROOT / "instances").glob("*.json")):
        yield optsched.read_instance(path)
    for seed in range(6):
        yield optsched.generate("jaillet-model-1", seed=seed, n=6 + seed)
        yield optsched.generate("jaillet-model-2", seed=seed, n=6 + 2 * seed)
    for seed in range(24):
        yield random_instance(seed)


def random_instance(seed: int) -> optsched.Instance:
    """Return a random instance: even seeds in rounds, odd ones in seconds; limits and switches."""
    generator = np.random.default_rng(seed)
    n = int(generator.choice([5, 8, 20, 60, 200]))
    seconds = seed % 2 == 1
    prompt = generator.integers(1, 40, n)
    output = generator.integers(1, 30, n)
    rate = generator.choice([0.0, 0.2, 2.0])
    arrival = np.cumsum(generator.exponential(rate, n)) if rate else np.zeros(n)
    arrival = (arrival - arrival[0]) * (0.02 if seconds else 1.0)
    spread = {}
    if seed % 3 == 0:
        spread = {
            "predicted": np.maximum(1, output + generator.integers(-5, 6, n)),
            "predicted_lower": np.maximum(1, output - generator.integers(0, 9, n)),
            "predicted_upper": output + generator.integers(0, 9, n),
        }
        spread["predicted"] = np.clip(
            spread["predicted"], spread["predicted_lower"], spread["predicted_upper"]
        )
    limits = optsched.Limits()
    if seed % 4 == 3:
        limits = optsched.Limits(max_batch_tokens=64, max_running=6)
    return optsched.Instance(
        arrival if seconds else arrival.astype(np.int64),
        prompt,
        output,
        kv_capacity=int((prompt + output).max() * generator.choice([1.2, 2.5, 6.0])),
        time_unit="second" if seconds else "round",
        limits=limits,
        hybrid_batching=False if seed % 5 == 4 else None,
        chunked_prefill=True if seed % 7 == 5 else None,
        kv_accounting="cached" if seed % 6 == 1 else "generated",
        name=f"random-{seed}",
        **spread,
    )


def digest(schedule: optsched.Schedule) -> str:
    """Return a digest of every decision of a schedule."""
    columns = sorted(
        (name, value) for name, value in vars(schedule).items() if isinstance(value, np.ndarray)
    )
    total = hashlib.sha256()
    for name, value in columns:
        total.update(name.encode() + str(value.dtype).encode() + value.tobytes())
    return total.hexdigest()[:16]


def of_policy(instance: optsched.Instance, spec: str) -> Any:
    """Return the digest and the metrics of a policy's schedule, or the kind of its error."""
    cost = None if instance.time_unit == "round" else COST
    try:
        done = optsched.run(optsched.Problem(instance, cost), spec, seed=1)
        return [digest(done.schedule), done.metrics]
    except optsched.OptschedError as error:
        return type(error).__name__


def of_command(*words: str) -> Any:
    """Return what a command answers, without what depends on the clock; or its exit status."""
    found = CliRunner().invoke(app, [*words, "--json", "-"])
    if found.exit_code != 0:
        return found.exit_code
    answer = json.loads(found.stdout)
    return {key: answer.get(key) for key in ("status", "objective", "bound", "objective_name")}


def record() -> dict[str, Any]:
    """Return every result by a name that says what it is of."""
    results: dict[str, Any] = {}
    specs = [*list_policies(), *SPECS]
    with tempfile.TemporaryDirectory() as folder:
        for instance in instances():
            print(instance.name, instance.n, file=sys.stderr, flush=True)
            file = str(Path(folder) / "instance.json")
            optsched.write_instance(instance, file)
            cost = [] if instance.time_unit == "round" else ["--cost-model", COST]
            for spec in specs:
                results[f"{instance.name} | simulate {spec}"] = of_policy(instance, spec)
            for name in BOUNDS:
                words = ("bound", file, *cost, "--method", name)
                results[f"{instance.name} | bound {name}"] = of_command(*words)
            if instance.n <= SMALL and instance.output_tokens.sum() <= SHORT:
                for name in methods(instance):
                    words = ("solve", file, *cost, "--method", name, "--time-limit", "120")
                    results[f"{instance.name} | solve {name}"] = of_command(*words)
        for path in sorted((ROOT / "instances" / "certificates").glob("*.json*")):
            name = path.name.split(".")[0].removesuffix("-certificate")
            for instance_path in sorted((ROOT / "instances").glob("*.json")):
                if name.startswith(instance_path.stem):
                    found = CliRunner().invoke(app, ["verify", str(instance_path), str(path)])
                    results[f"{path.name} | verify"] = [
                        found.exit_code,
                        *found.stdout.split(":", 1)[1:],
                    ]
    return results


def methods(instance: optsched.Instance) -> list[str]:
    """Return the exact methods for an instance."""
    if instance.time_unit == "round":
        return ["highs", "cpsat", "pulp", "ramp"]
    return ["labels", "cpsat"]


def known(before: Any, after: Any) -> Any:
    """Return what is after, without the metrics that nobody knew before."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {key: value for key, value in after.items() if key in before}
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [known(one, other) for one, other in zip(before, after, strict=True)]
    return after


def main() -> int:
    """Record the results of this checkout, or compare two records."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    if given.what == "record":
        text = json.dumps(record(), indent=0, sort_keys=True)
        given.files[0].write_text(text, encoding="utf-8")
        return 0
    before, after = (json.loads(file.read_text(encoding="utf-8")) for file in given.files)
    different = [
        key for key in before if before[key] != known(before[key], after.get(key, "missing"))
    ]
    for key in different:
        print(f"{key}\n  before: {before[key]}\n  after:  {after.get(key, 'missing')}")
    print(f"{len(before)} results of before, {len(different)} differ after")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
