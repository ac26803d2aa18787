"""Measure, for docs/howto/trace.md: time and memory of importing Azure's format.

    python benchmarks/import_traces.py FOLDER [--rows 1000000,27000000] [--sample 10000]
                      [--limit 1000]

Files of so many rows, in the form of 2024 (about 42 bytes a row), are written into FOLDER one
after the other and deleted again. Each import is a process of its own: wall and processor time
from its start to its end, the instance file included, and the most memory that it held.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
_CHUNK = 200_000


def write_trace(file: Path, rows: int) -> None:
    """Write a trace of random requests, 40 a second."""
    rng = np.random.default_rng(0)
    begin = np.datetime64("2024-05-10T00:00:00", "us")
    last = 0
    with open(file, "w", encoding="ascii", newline="\n") as stream:
        stream.write(HEADER)
        for at in range(0, rows, _CHUNK):
            n = min(_CHUNK, rows - at)
            times = last + np.cumsum(rng.integers(0, 50_000, n))
            last = int(times[-1])
            stamps = np.datetime_as_string(begin + times.astype("timedelta64[us]"), unit="us")
            prompt, output = rng.integers(1, 4000, n).tolist(), rng.integers(1, 500, n).tolist()
            stream.writelines(
                f"{stamp[:10]} {stamp[11:]}+00:00,{s},{o}\n"
                for stamp, s, o in zip(stamps.tolist(), prompt, output, strict=True)
            )


def measure(*words: str) -> tuple[float, float, float]:
    """Return wall and processor seconds and peak MiB of an import in a process of its own."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "optsched", "import", "azure", *words]
    process = os.spawnv(os.P_NOWAIT, sys.executable, command)
    _, status, used = os.wait4(process, 0)
    wall = time.perf_counter() - begin
    if status:
        sys.exit(f"{' '.join(command)}: status {os.waitstatus_to_exitcode(status)}")
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1000000,27000000")
    parser.add_argument("--sample", type=int, default=10_000)
    parser.add_argument("--limit", type=int, default=1000)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}\n")
    print("| rows | options | wall [s] | processor [s] | peak memory [MiB] |")
    print("|---|---|---|---|---|")
    for text in options.rows.split(","):
        rows = int(text)
        file, out = options.folder / f"rows-{rows}.csv", options.folder / "out.json"
        try:
            write_trace(file, rows)
            kinds = [
                ("--limit", str(options.limit)),
                ("--offset", str(rows - options.limit), "--limit", str(options.limit)),
                ("--sample", str(options.sample)),
            ]
            for words in [(), *kinds] if rows <= 2_000_000 else kinds:
                wall, cpu, peak = measure(str(file), "-o", str(out), *words)
                print(
                    f"| {rows:,} | {' '.join(words) or 'all'} | {wall:.1f} | {cpu:.1f} | "
                    f"{peak:.0f} |",
                    flush=True,
                )
        finally:
            file.unlink(missing_ok=True)
            out.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
