"""The theory's table: ratios of eight schedulers to proved optima, and worst cases of each.

    python benchmarks/ratios.py --store optima --out tables.md

Optima are kept in --store, so that a run that ends early goes on, and `optsched verify STORE`
checks what has a certificate. Tables that are not made again stay in the file: `--sizes` and
`--instances` alone leave out those in rounds, `--seconds-instances 0` those in seconds, and
`--search 0` the worst cases. docs/lab/ratios.md shows some of them.
"""

import argparse
from pathlib import Path

import numpy as np

from optsched import Instance, Problem, Study, generate, ratios, worst_case

IN_ROUNDS = (
    "mc-sf",
    "mc-benchmark",
    "sorted-f",
    "gba",
    "a-random",
    "alpha-beta",
    "nested-wait",
    "srpt",
)
IN_SECONDS = ("mc-sf", "mc-benchmark", "sorted-f", "vllm", "vllm-v1", "sarathi", "srpt", "spf-work")
MODELS = ("llama2-7b-a100-infermax", "llama2-7b-a100-vidur-fit")


def few(seed: int) -> Instance:
    """Return eight requests in seconds that arrive within 0.2 s and do not all fit at once."""
    rng = np.random.default_rng([11, seed])
    arrival = np.sort(rng.uniform(0, 0.2, 8).round(3))
    columns = rng.integers(20, 200, 8), rng.integers(1, 5, 8)
    return Instance(
        arrival - arrival[0],
        *columns,
        kv_capacity=400,
        time_unit="second",
        chunked_prefill=False,
        name=f"few-{seed}",
    )


def table(study: Study) -> str:
    """Return a study as a table, and how many optima are proved."""
    optima = {row.instance: row.bound == row.best_known for row in study.rows}
    certified = len(optima) - len(study.uncertified)
    words = f"{sum(optima.values())} of {len(optima)} optima are proved"
    found = study.summary().iloc[:, :4]
    rows = [row for row in found.to_numpy().tolist() if row[1] != "-"]
    lines = [f"| {' | '.join(row)} |" for row in ([*found], ["---"] * 4, *_with_dashes(rows))]
    return "\n".join(lines) + f"\n\n{words}; {certified} bounds have certificates.\n"


def _with_dashes(rows: list[list[str]]) -> list[list[str]]:
    return [[cell.replace(" to ", "\u2013") for cell in row] for row in rows]


def put(page: Path, sections: dict[str, str]) -> None:
    """Write sections into a file in place of those of the same titles, or behind the last."""
    old = page.read_text() if page.exists() else ""
    there = dict(part.split("\n\n", 1) for part in old.strip().split("### ")[1:])
    texts = [f"### {title}\n\n{text.strip()}\n" for title, text in (there | sections).items()]
    page.write_text("\n".join(texts))


def worst_cases(policies: tuple[str, ...], seconds: float, store: str, **asked: int) -> str:
    """Return the worst cases found, as a table."""
    lines = ["| policy | ratio | optimum proved | instances tried |", "|---|---|---|---|"]
    for policy in policies:
        found = worst_case(policy, budget_s=seconds, store=store, progress=False, **asked)
        ratio = f"{found.low:.3f}" if found.proved else f"{found.low:.3f} to {found.high:.3f}"
        proved = "yes" if found.proved else "no"
        lines.append(f"| {policy} | {ratio} | {proved} | {found.evaluations:,} |")

    return "\n".join(lines)


def main() -> None:
    """Run what is asked for and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="optima")
    parser.add_argument("--out", default="tables.md")
    parser.add_argument("--sizes", type=int, nargs="*", default=[12, 20, 30, 40])
    parser.add_argument("--instances", type=int, nargs="*", default=[60, 30, 20, 20])
    parser.add_argument("--seconds-instances", type=int, default=200)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--search", type=float, default=20.0, help="seconds for each worst case")
    given = parser.parse_args()
    asked, sections = {"store": given.store, "time_limit_s": given.time_limit}, {}

    for n, count in zip(given.sizes, given.instances, strict=True):
        for model in (1, 2):
            cases = [generate(f"jaillet-model-{model}", seed=k, n=n) for k in range(count)]
            study = ratios(IN_ROUNDS, cases, seeds=3, **asked)
            sections[f"Arrival model {model}, n = {n}"] = table(study)

    for model in MODELS if given.seconds_instances else ():
        cases = [Problem(few(k), model) for k in range(given.seconds_instances)]
        sections[f"Seconds, {model}, n = 8"] = table(ratios(IN_SECONDS, cases, **asked))

    if given.search:
        found = worst_cases(IN_ROUNDS, given.search, given.store, n=8, kv_capacity=50)
        sections["Worst cases found, n = 8, M = 50"] = found

    put(Path(given.out), sections)


if __name__ == "__main__":
    main()
