"""How far policies with proved constants are from the optimum (`docs/lab/papers.md`).

    python benchmarks/constants.py means [--count 200] [--limit 60]
    python benchmarks/constants.py worst [--budget 60]

`means` draws instances of n = 30 of both models of Jaillet et al. 2025, with prompts that are all 3
tokens or lognormal (median 2, sigma 1, clipped to what the output leaves), and solves them to
optimality. A ratio is an interval where the limit ended the proof. `worst` searches for an instance
on which a policy is bad, all arrivals at 0, and solves it; prompts are free, or all equal.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from optsched import Instance, generate, run
from optsched.analysis.ratio.exact import optimum
from optsched.analysis.ratio.worst import quick_optimum, worst_case

POLICIES = (
    "mc-sf", "least-work", "sorted-f", "gba", "gba:staggered=false", "gsa", "gsa:staggered=false",
)  # fmt: skip
MODELS = ("jaillet-model-1", "jaillet-model-2")
PROMPTS = ("equal", "lognormal")


def drawn(model: str, prompts: str, n: int, seed: int) -> Instance:
    """Return an instance of a model with other prompts, and outputs that fit beside them."""
    base = generate(model, seed=seed, n=n)
    rng = np.random.default_rng([seed, PROMPTS.index(prompts)])
    prompt = np.full(n, 3)
    if prompts == "lognormal":
        prompt = np.ceil(rng.lognormal(np.log(2), 1.0, n)).astype(np.int64)
    prompt = np.minimum(prompt, base.kv_capacity - 1)
    output = np.minimum(base.output_tokens, base.kv_capacity - prompt)
    return Instance(base.arrival, prompt, output, kv_capacity=base.kv_capacity)


def tel(instance: Instance, policy: str) -> float:
    return float(run(instance, policy).metrics["tel"] or 0)


def means(args: argparse.Namespace) -> None:
    print("| model | prompts | proved | policy | mean ratio | 95 % interval | largest |")
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        for prompts in args.prompts:
            begin, proved = time.perf_counter(), 0
            low: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            high: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            for seed in range(args.count):
                instance = drawn(model, prompts, args.n, seed)
                best = optimum(instance, time_limit_s=args.limit)
                assert best.value is not None
                assert best.bound is not None
                proved += best.value == best.bound
                for policy in POLICIES:
                    total = tel(instance, policy)
                    low[policy].append(total / best.value)
                    high[policy].append(total / best.bound)
            for policy in POLICIES:
                means = np.mean(low[policy]), np.mean(high[policy])
                width = 1.96 * np.std(low[policy], ddof=1) / np.sqrt(args.count)
                print(
                    f"| {model[-1]} | {prompts} | {proved} of {args.count} | `{policy}` "
                    f"| {between(*means)} | {means[0] - width:.3f} to {means[1] + width:.3f} "
                    f"| {between(max(low[policy]), max(high[policy]))} |",
                    flush=True,
                )
            print(f"({time.perf_counter() - begin:.0f} s)", flush=True)


def between(low: float, high: float) -> str:
    return f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"


def worst(args: argparse.Namespace) -> None:
    print("| policy | prompts | n | M | ratio | instances tried | prompts and outputs |")
    print("|---|---|---|---|---|---|---|")
    for policy in args.policies:
        for n, capacity in args.sizes:
            found = worst_case(
                policy, free, args.budget, kv_capacity=capacity, n=n, seed=0, progress=False
            )
            show(policy, "free", found.instance, (found.low, found.high), found.evaluations)
            equal(policy, n, capacity, args.budget)


def show(
    policy: str, prompts: str, instance: Instance, ratio: tuple[float, float], tried: int
) -> None:
    kinds: dict[tuple[int, int], int] = {}
    for kind in zip(instance.prompt_tokens.tolist(), instance.output_tokens.tolist(), strict=True):
        kinds[kind] = kinds.get(kind, 0) + 1
    text = ", ".join(f"{count} x {s}+{o}" for (s, o), count in sorted(kinds.items()))
    print(
        f"| `{policy}` | {prompts} | {instance.n} | {instance.kv_capacity} "
        f"| {between(*ratio)} | {tried} | {text} |",
        flush=True,
    )


def free(_policy: Any, kv_capacity: int, n: int, rng: np.random.Generator) -> Instance:
    """Return a random instance of few kinds of requests, all at 0."""
    kinds = int(rng.integers(1, 4))
    output = rng.integers(1, kv_capacity, kinds)
    prompt = rng.integers(1, kv_capacity - output + 1)
    which = rng.integers(0, kinds, n)
    return Instance(np.zeros(n), prompt[which], output[which], kv_capacity=kv_capacity)


def equal(policy: str, n: int, capacity: int, budget: float) -> None:
    """Search instances of equal prompts and two kinds of outputs, and solve the worst."""
    rng, begin, tried = np.random.default_rng(0), time.perf_counter(), 0
    best: tuple[float, Instance | None] = (0.0, None)
    while time.perf_counter() - begin < budget * 2 / 3:
        prompt = int(rng.integers(1, capacity // 2))
        kinds = rng.integers(1, capacity - prompt + 1, 2)
        many = int(rng.integers(0, n + 1))
        instance = Instance(
            np.zeros(n), np.full(n, prompt), np.repeat(kinds, [many, n - many]),
            kv_capacity=capacity,
        )  # fmt: skip
        ratio = tel(instance, policy) / quick_optimum(instance)[0]
        tried += 1
        if ratio > best[0]:
            best = ratio, instance
    assert best[1] is not None
    total = tel(best[1], policy)
    known = optimum(best[1], time_limit_s=budget / 3)
    assert known.value is not None
    assert known.bound is not None
    show(policy, "equal", best[1], (total / known.value, total / known.bound), tried)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=("means", "worst"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=PROMPTS)
    parser.add_argument("--n", type=int, default=30)
    parser.add_argument("--count", type=int, default=200, help="instances of each kind")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per optimum")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds per search")
    parser.add_argument(
        "--policies", nargs="+", default=("smallest-volume", "sorted-f", "gba", "gsa")
    )
    args = parser.parse_args()
    args.sizes = ((12, 100), (24, 60))
    optimum(generate("jaillet-model-1", seed=99, n=8), time_limit_s=600)  # compiles
    optimum(generate("jaillet-model-2", seed=99, n=8), time_limit_s=600)
    means(args) if args.table == "means" else worst(args)


if __name__ == "__main__":
    main()
