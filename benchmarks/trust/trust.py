"""All public measured runs of vLLM against the twin: a table for each release, with an alarm.

    OPTSCHED_DATA=DIR python benchmarks/trust/trust.py [--check]

A run is served by `vllm-v1` under a cost model that is fitted to a profile of the same GPU alone,
and its errors are written to `VERSION.csv` beside this file: (twin - measured) / measured in per
cent. The command ends with status 1 if an error is farther from 0 than in the newest other table,
by more than `ALARM` points; `--check` compares with the table of this version, too, and writes
nothing. A run whose files are not there is an error, so that no table leaves one out unseen.
"""

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

import optsched
from optsched import Problem, run
from optsched.experiments import load_studies

load_studies()
from optsched_studies.vllm_measured import of_measured, run_of  # noqa: E402

HERE = Path(__file__).parent
ALARM = 2.0
"""Points by which the error of a run may grow from one release to the next."""
RUNS = ("rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b")
METRICS = ("mean_latency", "mean_ttft", "mean_tpot", "makespan")
Errors = dict[tuple[str, str], float]


def errors() -> Iterator[tuple[str, str, float, float, float]]:
    """Yield run, metric, measured seconds, the twin's, and the error in per cent."""
    for name in RUNS:
        instance, times, cost = run_of("", name)
        seen: Mapping[str, float] = of_measured(instance, times)
        twin = run(Problem(instance, cost), "vllm-v1").metrics
        for metric in METRICS:
            error = 100 * (twin[metric] / seen[metric] - 1)
            yield name, metric, round(seen[metric], 6), round(twin[metric], 6), round(error, 2)


def read(file: Path) -> Errors:
    """Return the errors of a table."""
    with file.open(newline="", encoding="utf-8") as lines:
        return {(r["run"], r["metric"]): float(r["error_percent"]) for r in csv.DictReader(lines)}


def grown(before: Errors, now: Errors) -> list[str]:
    """Return a line for each error that has grown by more than the alarm, or that is gone."""
    found = []
    for (name, metric), old in before.items():
        new = now.get((name, metric))
        if new is None:
            found.append(f"{name}: {metric}: no error any more; it was {old:+.2f} %")
        elif abs(new) > abs(old) + ALARM:
            found.append(f"{name}: {metric}: {new:+.2f} %; it was {old:+.2f} %")

    return found


def main(folder: Path, check: bool) -> int:
    """Write or check the table of this version, and say which errors have grown."""
    own = folder / f"{optsched.__version__}.csv"
    tables = sorted(folder.glob("*.csv"), key=lambda file: Version(file.stem))
    earlier = [file for file in tables if check or file != own]
    rows = list(errors())
    for row in rows:
        print("{:<24} {:<13} measured {:>9.4g} s, twin {:>9.4g} s, {:+.2f} %".format(*row))

    now = {(name, metric): error for name, metric, _, _, error in rows}
    worse = grown(read(earlier[-1]), now) if earlier else []
    if not check:
        with own.open("w", newline="", encoding="utf-8") as lines:
            table = csv.writer(lines, lineterminator="\n")
            table.writerow(("run", "metric", "measured_s", "twin_s", "error_percent"))
            table.writerows(rows)

    for line in worse:
        print(f"ALARM: {line}", file=sys.stderr)

    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main(HERE, "--check" in sys.argv[1:]))
