"""`diagnose` against servers whose truth is known: docs/lab/known-servers.md.

    python benchmarks/known_servers.py [--data FOLDER] [--page docs/lab/known-servers.md]

The servers are those of tests/known_servers.py, which share no code with the package.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from known_servers import SERVERS, published
from test_known_servers import Row, rows_of

_MARK = "<!-- rows -->"


def main() -> None:
    """Print, or write into the page, a row for each server and for each change that is off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    servers = [*SERVERS, *([published(asked.data / "llmservingsim")] if asked.data else [])]
    every: list[Row] = []
    lines = [
        "| server | loss | twin | signs | inside | first | its true gain | off: true, said |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for server in servers:
        with tempfile.TemporaryDirectory() as folder:
            rows, found = rows_of(server, Path(folder))

        every += rows
        shares = found["gains_of"] != "mean latency"
        loss = server.loss(shares)
        metrics = found["metrics"]
        twin = 1 - metrics["slo_attainment"] if shares else metrics["mean_latency"]
        what = found["first"]["what"] if found["first"] else "-"
        true = [f"{100 * row.true:.0f} %" for row in rows if row.what == what]
        off = [
            f"`{row.what}` {100 * row.true:.0f}, {100 * row.gain:.0f} "
            f"({100 * row.low:.0f} to {100 * row.high:.0f})"
            for row in rows
            if not row.inside or (abs(row.true) > 0.05 and not row.sign)
        ]
        values = [f"{loss:.3f}" if shares else f"{loss:.2f} s", f"{twin:.3f}", _signs(rows)]
        values += [f"{sum(row.inside for row in rows)} of {len(rows)}", f"`{what}`"]
        lines.append(
            f"| {server.name} | {' | '.join([*values, *(true or ['-'])])} | {'; '.join(off)} |"
        )
        print(lines[-1], flush=True)

    inside = f"{sum(row.inside for row in every)} of {len(every)}"
    lines.append(f"| all | | | {_signs(every)} | {inside} | | | |")
    print(lines[-1])
    if asked.page is not None:
        head, _, _ = asked.page.read_text().partition(_MARK)
        asked.page.write_text("\n".join([head + _MARK, "", *lines, ""]))


def _signs(rows: list[Row]) -> str:
    """Return in how many rows of a true change above 5 % the sign is right."""
    large = [row for row in rows if abs(row.true) > 0.05]
    return f"{sum(row.sign for row in large)} of {len(large)}"


if __name__ == "__main__":
    main()
