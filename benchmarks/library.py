"""Make the files of instances/library, and fill its bks.json by bounded work.

    python benchmarks/library.py build                # instances that are missing, and their values
    python benchmarks/library.py build --again open   # search once more on open instances
    python benchmarks/library.py page                 # what docs/library.md has of schedulers

``build`` makes what library.toml lists, one instance after the other, and looks for a schedule and
a certified bound for as many seconds as the table says. It may be stopped and goes on. An instance
that is there is never made again.
"""

from __future__ import annotations

import argparse
import math
import time
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import optsched
from optsched.analysis import library
from optsched.analysis.ratio import worst_case
from optsched.costs.fleet import Fleet
from optsched.files.library import instance_file, library_folder, read_library, write_library
from optsched.optimize.strategies import allowed_policies
from optsched.policies import behind_routers

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((ROOT / "benchmarks" / "library.toml").read_text(encoding="utf-8"))
RELEASE = "2026.1"
BY = "the optsched developers"
PICTURE = ROOT / "docs" / "images" / "library.png"
POLICIES = (
    "fcfs",
    "vllm",
    "vllm-v1",
    "sarathi",
    "hrrn",
    "wait",
    "spf",
    "patient",
)
POLICIES += ("mc-sf", "smallest-volume", "least-work", "spf-work", "patient-work")


def rows(names: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield family, name and row of the table, of the instances and families named or of all."""
    for family, table in TABLE.items():
        for name, own in table["instances"].items():
            if not names or family in names or name in names:
                row = {**table, **own, "set": {**table.get("set", {}), **own.get("set", {})}}
                yield family, name, row


def make(row: dict[str, Any], name: str) -> tuple[optsched.Instance, str]:
    """Return the instance of a row, and how it is made again."""
    seed, values = row.get("seed", 0), row["set"]
    if row["generator"] == "worst":
        found = worst_case(
            values["policy"],
            values["family"],
            row["search_s"],
            kv_capacity=values["kv_capacity"],
            n=values["n"],
            seed=seed,
            progress=False,
        )
        given = ", ".join(f"{key} {value}" for key, value in values.items())
        source = f"worst_case with {given}, seed {seed}, {row['search_s']} s; found ratio "
        return replace(found.instance, name=name, known=None), f"{source}{found.low:.4g}"

    instance = optsched.generate(row["generator"], seed=seed, **values)
    texts = "".join(f" --set {key}={value}" for key, value in values.items())
    source = f"optsched generate {row['generator']} --seed {seed}{texts}"
    for key, value in row.get("requests", {}).items():
        instance = replace(instance, **{key: np.full(instance.n, value)})
        source += f"; then {key} = {value} for all"

    return replace(instance, name=name), source


def candidates(
    instance: optsched.Instance, row: dict[str, Any], seconds: float, seed: int
) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield how it was found, content, and seconds, of schedules and then of certificates."""
    cost, objective = row.get("cost_model"), row["objective"]
    given: dict[str, Any] = {"time_limit_s": seconds, "seed": seed}
    one = optsched.Problem(instance, cost, objective)
    began = time.perf_counter()
    workers, prefixes = row.get("workers", 1), instance.prefix_parent is not None
    fleet = Fleet.of(row.get("pools") or f"{workers}m", cost, link=row.get("link"))
    several = replace(one, fleet=fleet) if workers > 1 else one
    routed = several if row.get("pools") else replace(one, fleet=Fleet.of(workers, cost))

    specs = allowed_policies(instance) if prefixes or workers > 1 else []
    for spec in behind_routers(specs, workers):
        try:
            schedule = optsched.run(routed, spec).schedule
        except optsched.OptschedError:
            continue

        yield spec, schedule.to_dict(), time.perf_counter() - began

    if objective == "makespan" or objective == "slo_attainment":
        solved = optsched.solve(one, **given)
        if solved.schedule is not None:
            yield solved.method, solved.schedule.to_dict(), time.perf_counter() - began

    began = time.perf_counter()
    found = optsched.bound(several, **given)
    spent = round(time.perf_counter() - began, 1)
    if found.schedule is not None:
        yield str(found.found_by), found.schedule.to_dict(), spent
    if found.certificate is not None:
        yield str(found.method), found.certificate, spent


def build(
    names: list[str],
    again: bool = False,
    seconds: float | None = None,
    seed: int = 0,
    folder: Path | None = None,
) -> None:
    """Make instances and search. What is better than what is there takes its place."""
    root = library_folder(folder)
    root.mkdir(exist_ok=True)
    if not (root / "bks.json").exists():
        empty: dict[str, Any] = {"format": "optsched-library", "version": 1, "release": RELEASE}
        write_library({**empty, "families": {}, "instances": {}}, folder)

    for family, name, row in rows(names):
        data = read_library(folder)
        data["families"].setdefault(family, row["summary"])
        entry = data["instances"].get(name)
        if entry is not None and not (again and entry["status"] == "open"):
            continue

        if entry is None:
            instance, source = make(row, name)
            optsched.write_instance(instance, instance_file(name, folder))
            entry = {"family": family, "purpose": row["purpose"], "source": source}
            entry |= {"objective": row["objective"], "cost_model": row.get("cost_model")}
            entry |= {"workers": row.get("workers", 1), "requests": instance.n}
            entry |= {key: row[key] for key in ("pools", "link") if key in row}
            entry |= {"instance_sha256": instance.sha256, "status": "open"}
            data["instances"][name] = entry
        else:
            instance = library.load(name, folder)

        for method, content, spent in candidates(instance, row, seconds or row["search_s"], seed):
            origin = {"by": BY, "method": method, "seconds": round(spent, 1), "threads": 1}
            answer = library.answer(name, data, content, origin, folder=folder)
            if answer.entry is not None:
                library.keep(answer, data, folder)

        entry = data["instances"][name]
        best, limit = entry["best"]["value"], (entry.get("bound") or {}).get("value")
        print(f"{name}: {entry['status']}, best {best}, bound {limit}", flush=True)
        write_library(data, folder)


def tables(data: dict[str, Any]) -> str:
    """Return a table of the instances of each family. The site's build puts them into its page."""
    families = data["families"].items()
    return "\n\n".join(f"### {name}\n\n{words}\n\n{table(name, data)}" for name, words in families)


def table(family: str, data: dict[str, Any]) -> str:
    """Return the table of a family's instances."""
    lines = [
        "| instance | requests | objective | best known | bound | gap | status | what it is for |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, entry in data["instances"].items():
        if entry["family"] != family:
            continue

        share, bound = library.gap(entry), entry.get("bound")
        cells = [f"`{name}`", entry["requests"], entry["objective"], short(entry["best"]["value"])]
        cells += ["-" if bound is None else short(bound["value"])]
        cells += ["-" if share is None else f"{share:.2%}", entry["status"], entry["purpose"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")

    return "\n".join(lines)


def short(value: float) -> str:
    """Return a value with seven digits, or all of an integer."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.7g}"


def policy_table(data: dict[str, Any], folder: Path | None) -> str:
    """Return the geometric mean ratios of policies to best known and bound, by family."""
    ratios: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, entry in data["instances"].items():
        if entry.get("bound") is None or entry["workers"] > 1:
            continue

        instance, ends = library.load(name, folder, data), (entry["best"], entry["bound"])
        for policy in POLICIES:
            value = value_of(policy, instance, entry)
            low, high = (math.inf if value is None else value / end["value"] for end in ends)
            for family in (entry["family"], "all"):
                ratios.setdefault((family, policy), []).append((low, high))

    families = list(dict.fromkeys(family for family, _ in ratios if family != "all"))
    lines = ["| family | " + " | ".join(f"`{policy}`" for policy in POLICIES) + " |"]
    lines += ["|---" * (1 + len(POLICIES)) + "|"]
    for family in [*families, "all"]:
        cells = [means(ratios[family, policy]) for policy in POLICIES]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")

    return "\n".join(lines)


def value_of(policy: str, instance: optsched.Instance, entry: dict[str, Any]) -> float | None:
    """Return a policy's value, or None if it makes no schedule."""
    cost = entry["cost_model"]
    try:
        evaluation = optsched.run(optsched.Problem(instance, cost), policy).evaluation
    except optsched.OptschedError:
        return None

    value = evaluation.metrics[entry["objective"]]
    return None if value is None else float(value)


def means(pairs: list[tuple[float, float]]) -> str:
    """Return the interval of geometric means, of those instances that the policy can schedule."""
    ends = [
        math.exp(sum(map(math.log, column)) / len(column)) for column in zip(*pairs, strict=True)
    ]
    if not all(map(math.isfinite, ends)):
        return "-"

    low, high = (f"{end:.2f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def picture(data: dict[str, Any], file: Path) -> None:
    """Draw the gaps of all instances with a bound, by family."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(e["family"], library.gap(e)) for e in data["instances"].values() if e.get("bound")]
    families = list(dict.fromkeys(family for family, _ in rows))
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for k, family in enumerate(families):
        gaps = sorted(100 * (gap or 0.0) for name, gap in rows if name == family)
        near = [sum(abs(gap - other) < 1.5 for other in gaps[:j]) for j, gap in enumerate(gaps)]
        colour = plt.get_cmap("turbo")((k + 0.5) / len(families))
        rows_at = [k + 0.1 * shift for shift in near]
        axes.plot(gaps, rows_at, "o", alpha=0.7, markersize=5, color=colour)

    axes.set_yticks(range(len(families)), families)
    axes.invert_yaxis()
    axes.set_xlabel("gap between best known schedule and bound, %")
    axes.set_title("What is proved of each instance, by family (0: closed)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("build", "page"))
    parser.add_argument("names", nargs="*", help="instances or families; all if none is named")
    parser.add_argument("--again", choices=("open",), help="search on open instances, too")
    parser.add_argument("--seconds", type=float, help="of each search, in place of the table's")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "build":
        warnings.simplefilter("ignore", UserWarning)
        build(given.names, given.again == "open", given.seconds, given.seed)
    else:
        warnings.simplefilter("ignore", UserWarning)
        print(policy_table(read_library(), None))
        picture(read_library(), PICTURE)


if __name__ == "__main__":
    main()
