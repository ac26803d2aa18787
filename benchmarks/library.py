"""Make the files of instances/library, fill its bks.json by bounded work, and make its page.

    python benchmarks/library.py build                # instances that are missing, and their values
    python benchmarks/library.py build --again open   # search once more on open instances
    python benchmarks/library.py page                 # docs/library.md and its picture

``build`` makes what library.toml lists, one instance after the other, and looks for a schedule and
a certified bound for as many seconds as the table says. It may be stopped and goes on. An instance
that is there is never made again.
"""

from __future__ import annotations

import argparse
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
from optsched.files.library import instance_file, library_folder, read_library, write_library
from optsched.optimize.strategies import allowed_policies
from optsched.policies import behind_routers

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((ROOT / "benchmarks" / "library.toml").read_text(encoding="utf-8"))
RELEASE = "2026.1"
BY = "the optsched developers"
PAGE, PICTURE = ROOT / "docs" / "library.md", ROOT / "docs" / "images" / "library.png"
POLICIES = (
    "fcfs",
    "vllm",
    "vllm-v1",
    "sarathi",
    "hrrn",
    "mc-sf",
    "smallest-volume",
    "least-work",
)


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
    given: dict[str, Any] = {"objective": objective, "cost_model": cost, "seed": seed}
    began = time.perf_counter()
    workers, prefixes = row.get("workers", 1), instance.prefix_parent is not None

    specs = allowed_policies(instance) if prefixes or workers > 1 else []
    for spec in behind_routers(specs, workers):
        try:
            schedule = optsched.simulate(instance, spec, cost)
        except optsched.OptschedError:
            continue

        yield spec, schedule.to_dict(), time.perf_counter() - began

    if prefixes or workers > 1:
        return

    if objective == "makespan" or objective == "slo_attainment":
        solved = optsched.solve(instance, time_limit_s=seconds, **given)
        if solved.schedule is not None:
            yield solved.method, solved.schedule.to_dict(), time.perf_counter() - began

    began = time.perf_counter()
    found = optsched.bound(instance, time_limit_s=seconds, **given)
    spent = round(time.perf_counter() - began, 1)
    if found.schedule is not None:
        yield str(found.found_by), found.schedule.to_dict(), spent
    if found.certificate is not None:
        yield str(found.name), found.certificate, spent


def build(names: list[str], again: bool, seconds: float | None, seed: int) -> None:
    """Make instances and search. What is better than what is there takes its place."""
    folder = library_folder()
    folder.mkdir(exist_ok=True)
    if not (folder / "bks.json").exists():
        write_library(
            {
                "format": "optsched-library",
                "version": 1,
                "release": RELEASE,
                "families": {},
                "instances": {},
            }
        )

    for family, name, row in rows(names):
        data = read_library()
        data["families"].setdefault(family, row["summary"])
        entry = data["instances"].get(name)
        if entry is not None and not (again and entry["status"] == "open"):
            continue

        if entry is None:
            instance, source = make(row, name)
            optsched.write_instance(instance, instance_file(name))
            entry = {"family": family, "purpose": row["purpose"], "source": source}
            entry |= {"objective": row["objective"], "cost_model": row.get("cost_model")}
            entry |= {"workers": row.get("workers", 1), "requests": instance.n}
            entry |= {"instance_sha256": instance.sha256, "status": "open"}
            data["instances"][name] = entry
        else:
            instance = library.load(name)

        for method, content, spent in candidates(instance, row, seconds or row["search_s"], seed):
            origin = {"by": BY, "method": method, "seconds": round(spent, 1), "threads": 1}
            answer = library.answer(name, data, content, origin)
            if answer.entry is not None:
                key, packed = answer.content
                target = folder / answer.entry[key]["file"]
                target.parent.mkdir(exist_ok=True)
                library.write_bytes(packed, target)
                data["instances"][name] = answer.entry

        entry = data["instances"][name]
        best, limit = entry["best"]["value"], (entry.get("bound") or {}).get("value")
        print(f"{name}: {entry['status']}, best {best}, bound {limit}", flush=True)
        write_library(data)


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


if __name__ == "__main__":
    main()
