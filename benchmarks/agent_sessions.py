"""The interval on the completion of real agent sessions, and policies in it, as a table.

    python benchmarks/agent_sessions.py FILE [--rate R] [--kv-capacity N] [--cost-model NAME] ...

FILE has sessions in Weka's format, which arrive as a Poisson process of R per second. The bound is
that of `optsched bound --objective mean_session_completion`, and its certificate is checked. The
best schedule is the best of the policies below and of a search over their parameters: who waits
first, how long the KV of a session is kept, and how many requests run.
"""

from __future__ import annotations

import argparse
import time

from optsched import Problem, bound, load_cost_model, run
from optsched.bounds.certificate import verify_certificate
from optsched.bounds.sessions import alone_times, ways_of
from optsched.workloads.traces import read_trace

PROGRAM = "policy=priority,priority=session"
LEAST = "policy=priority,priority=attained"
POLICIES = {
    "FCFS, LRU (vLLM)": "",
    "FCFS, KV kept 60 s": "eviction=ttl,ttl=60",
    "program FCFS, LRU": PROGRAM,
    "least attained service, LRU": LEAST,
    "least attained service, KV kept 60 s": f"{LEAST},eviction=ttl,ttl=60",
    "program FCFS, KV kept 60 s (Continuum)": f"{PROGRAM},eviction=ttl,ttl=60",
}
CHOICES = {
    "order": (PROGRAM, "policy=fcfs", LEAST, "policy=shortest-prefill-first"),
    "ttl": (60, 0, 15, 30, 120, 240),
    "max_num_seqs": (256, 32, 16, 8, 4),
}
"""What is searched, one parameter after another, from the first of each."""


def spec_of(order: str, ttl: int, max_num_seqs: int) -> str:
    kept = f",eviction=ttl,ttl={ttl}" if ttl else ""
    return f"vllm-v1:{order}{kept},max_num_seqs={max_num_seqs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--rate", type=float, default=0.006)
    parser.add_argument("--kv-capacity", type=int, default=600_000)
    parser.add_argument("--cost-model", default="llama2-7b-a100-fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    cost = load_cost_model(args.cost_model)
    instance = read_trace(
        "weka", args.file, sessions=True, rate=args.rate, kv_capacity=args.kv_capacity,
        seed=args.seed, limit=args.limit,
    )  # fmt: skip
    goal = "mean_session_completion"
    begin = time.perf_counter()
    found = bound(Problem(instance, cost, goal), method="sessions-work", time_limit_s=0)
    took = time.perf_counter() - begin
    assert found.certificate is not None
    assert found.bound is not None
    proved = verify_certificate(instance, found.certificate)

    made = dict[str, tuple[float, ...]]()

    def mean(spec: str) -> float:
        if spec not in made:
            judged = run(Problem(instance, cost), spec).evaluation
            assert judged.session_completion is not None
            reuse = judged.metrics["prefix_hit_rate"] or 0.0
            made[spec] = judged.metrics[goal], reuse, judged.metrics["mean_ttft"]

        return made[spec][0]

    for spec in POLICIES.values():
        mean(f"vllm-v1:{spec}".rstrip(":"))

    best = {name: values[0] for name, values in CHOICES.items()}
    for name, values in CHOICES.items():
        tries = {value: mean(spec_of(**{**best, name: value})) for value in values}
        best[name] = min(tries, key=tries.__getitem__)

    winner = min(made, key=mean)
    alone = alone_times(instance, load_cost_model(cost) if isinstance(cost, str) else cost)
    chain = float(ways_of(instance, instance.sessions, alone).chain.mean())
    print(
        f"{instance.n} calls of sessions, {args.rate} sessions a second, {args.kv_capacity} tokens"
    )
    print(f"chain {chain:.0f} s, bound {found.bound:.0f} s, proved {proved:.0f} s ({took:.1f} s)")
    low, top = max(found.bound - chain, 0.0), mean(winner) - chain
    print(
        f"interval: 1 to {mean(winner) / found.bound:.3f}; above the chain {low:.0f} to {top:.0f} s"
    )
    columns = "mean completion [s]", "over the bound", "above the chain [s]", "hit rate", "TTFT [s]"
    print(f"\n| policy | {' | '.join(columns)} |\n|---|---|---|---|---|---|")
    rows = {name: f"vllm-v1:{spec}".rstrip(":") for name, spec in POLICIES.items()}
    for name, spec in {**rows, f"best found: `{winner}`": winner}.items():
        value, reuse, ttft = made[spec]
        print(
            f"| {name} | {value:.0f} | {value / found.bound:.2f} | {value - chain:.0f} | "
            f"{100 * reuse:.0f} % | {ttft:.1f} |"
        )


if __name__ == "__main__":
    main()
