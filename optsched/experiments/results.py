"""An experiment's results as rows, tables and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched import __version__
from optsched.experiments.base import Claim, Experiment, Row
from optsched.experiments.store import read
from optsched.files.outputs import write_bytes
from optsched.files.strict_json import csv_text, json_text

if TYPE_CHECKING:
    from pandas import DataFrame

COMMON_COLUMNS = {
    "trial": "number of the trial, from 0",
    "failed": "why the trial has no results (a crash, too much memory); empty if it has",
}


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of an experiment.

    Parameters
    ----------
    experiment : Experiment
    parameters : dict
    seed : int
    rows : list of dict
        One row per trial, in the order of trials. ``failed`` says why a trial has no results, and
        is None if it has.
    claims : list of Claim
        The paper's statements with our values.
    ran, resumed : int
        Number of trials that ran now, and that were taken from the store.
    wall_s : list of float
        Seconds that each trial took when it ran.
    departures : list of str
        What is not as in the paper, in words. Claims have no verdict then.
    """

    experiment: Experiment
    parameters: dict[str, Any]
    seed: int
    rows: list[Row]
    claims: list[Claim]
    ran: int
    resumed: int
    wall_s: list[float]
    departures: list[str]

    @property
    def failed(self) -> dict[int, str]:
        """Why trials have no results (a crash, too much memory), by their number."""
        return {row["trial"]: row["failed"] for row in self.rows if row["failed"] is not None}

    @property
    def without_schedule(self) -> dict[int, str]:
        """Why trials that ran have no schedule, by their number."""
        return {row["trial"]: row["error"] for row in self.rows if row.get("error")}

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, which the parameters and the seed determine."""
        return {
            "format": "optsched-experiment",
            "version": 1,
            "optsched": __version__,
            "experiment": self.experiment.name,
            "paper": self.experiment.paper,
            "parameters": self.parameters,
            "seed": self.seed,
            "trials": len(self.rows),
            "departures": self.departures,
            "failed": [{"trial": trial, "why": why} for trial, why in self.failed.items()],
            "claims": [
                {"what": c.what, "paper": c.paper, "ours": c.ours, "holds": c.verdict}
                for c in self.claims
            ],
            "columns": {**self.experiment.columns, **COMMON_COLUMNS},
        }

    def write(self, folder: Path) -> None:
        """Write results.csv, timings.csv and summary.json.

        Parameters
        ----------
        folder : Path
            An existing folder.
        """
        timings = [{"trial": k, "wall_s": wall} for k, wall in enumerate(self.wall_s)]
        write_bytes(rows_as_csv(self.rows).encode(), folder / "results.csv")
        write_bytes(rows_as_csv(timings).encode(), folder / "timings.csv")
        write_bytes(json_text(self.summary()).encode(), folder / "summary.json")


def _columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns of rows in order of first appearance, with ``failed`` last."""
    return sorted(dict.fromkeys(key for row in rows for key in row), key=lambda c: c == "failed")


def rows_as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with columns in order of first appearance and ``failed`` last."""
    columns = _columns_of(rows)
    return csv_text(columns, ([row.get(c) for c in columns] for row in rows))


def load(folder: str | Path) -> DataFrame:
    """Return the finished trials in an experiment's folder, even while the experiment runs."""
    from pandas import DataFrame

    _, records = read(folder)
    rows = [record.row for record in records]
    table = DataFrame.from_records(rows, columns=_columns_of(rows) or ["trial", "failed"])
    return table.assign(wall_s=[record.wall_s for record in records])
