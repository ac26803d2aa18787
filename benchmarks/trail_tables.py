"""The tables behind docs/lab/papers.md, from the experiments that it names.

    python benchmarks/trail_tables.py [--out DIR] [--draws 10]

Runs ``trail-predictions``, ``trail-c`` and ``trail-rates`` into folders of DIR, or takes from them
what is there, and prints means over draws with 95 % t-intervals.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.trail import BURST, POLICIES, SETTINGS, mean

from optsched.experiments import Row
from optsched.experiments.runner import run_experiment

NAMES = {spec: name for name, spec in {**POLICIES, **BURST}.items()}


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")


def cell(rows: Sequence[Row], column: str, digits: int, **where: Any) -> str:
    """Return a mean over draws and half of its interval."""
    found = mean(rows, column, **where)
    return "" if found is None else f"{found.mean:,.{digits}f} ± {found.half_width:,.{digits}f}"


def predictions(rows: Sequence[Row]) -> None:
    """Print mean absolute errors by noise and bias."""
    columns = {"one-off": "one_off", "classifier alone": "classifier",
               "filter, as printed": "printed", "filter, as the text": "refined"}  # fmt: skip
    axes = dict.fromkeys((row["noise"], row["bias"]) for row in rows)
    table(
        ["noise", "bias", *columns],
        [[f"{n:g}", f"{b:g}", *(cell(rows, k, 1, noise=n, bias=b) for k in columns.values())]
         for n, b in axes],
    )  # fmt: skip


def by_c(rows: Sequence[Row]) -> None:
    """Print latency, KV and evictions by C."""
    columns = {
        "mean latency, s": ("mean_latency_s", 2), "median, s": ("p50_latency_s", 2),
        "mean TTFT, s": ("mean_ttft_s", 2), "mean KV, tokens": ("mean_kv", 0),
        "peak KV, tokens": ("peak_kv", 0), "evictions": ("evictions", 0),
    }  # fmt: skip
    for setting in SETTINGS:
        for keep in (False, True):
            print(f"\n**{setting}, preempted KV {'kept' if keep else 'discarded'}**")
            here = {"setting": setting, "keep": keep}
            table(
                ["C", *columns],
                [[f"{c:g}", *(cell(rows, k, d, c=c, **here) for k, d in columns.values())]
                 for c in dict.fromkeys(row["c"] for row in rows)],
            )  # fmt: skip


def by_rate(rows: Sequence[Row]) -> None:
    """Print latencies by rate and policy, then those of the burst."""
    columns = {"mean_latency_s": "mean latency", "p50_latency_s": "median latency",
               "mean_ttft_s": "mean TTFT", "p50_ttft_s": "median TTFT"}  # fmt: skip
    for setting in dict.fromkeys(row["setting"] for row in rows):
        here = [row for row in rows if row["setting"] == setting]
        rates = [rate for rate in dict.fromkeys(row["rate"] for row in here) if rate is not None]
        for column, words in columns.items():
            print(f"\n**{setting}: {words}, s**")
            table(
                ["requests/s", *POLICIES],
                [[f"{rate:g}",
                  *(cell(here, column, 2, rate=rate, policy=spec) for spec in POLICIES.values())]
                 for rate in rates],
            )  # fmt: skip
        print(f"\n**{setting}, burst, s**")
        table(
            ["policy", *columns.values()],
            [[name, *(cell(here, column, 2, rate=None, policy=spec) for column in columns)]
             for spec, name in NAMES.items()],
        )  # fmt: skip


def main() -> None:
    """Run or resume the experiments and print their tables and claims."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--draws", type=int, help="default: the experiments' own")
    given = parser.parse_args()
    settings = {} if given.draws is None else {"draws": given.draws}
    for name, show in (("trail-predictions", predictions), ("trail-c", by_c),
                       ("trail-rates", by_rate)):  # fmt: skip
        outcome = run_experiment(name, settings, out=given.out / name)
        print(f"\n## {name}: {len(outcome.rows)} trials")
        show(outcome.rows)
        table(
            ["claim", "paper", "ours", "holds"],
            [[c.what, str(c.paper), "" if c.ours is None else str(c.ours),
              {True: "yes", False: "no", None: ""}[c.verdict]] for c in outcome.claims],
        )  # fmt: skip


if __name__ == "__main__":
    main()
