"""The durable store of finished trials: one SQLite file, one row per trial."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from optsched import __version__
from optsched.errors import InputError
from optsched.instance import canonical_json


@cache
def code_version() -> str:
    """Return the version and a digest of the package's sources: results belong to their code."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def trial_key(experiment: str, trial: dict[str, Any]) -> str:
    """Return what identifies a trial: experiment, its parameters and seed, and the code."""
    data = {"experiment": experiment, "trial": trial, "code": code_version()}
    return hashlib.sha256(canonical_json(data)).hexdigest()


class Store:
    """Finished trials by key; a killed process loses none that `put` has stored.

    Parameters
    ----------
    path : path or None
        None keeps the trials in memory.

    Raises
    ------
    InputError
        A file that is no store of trials.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(path or ":memory:", timeout=60)
            if path is not None:
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS trials (key TEXT PRIMARY KEY, experiment TEXT NOT "
                "NULL, code TEXT NOT NULL, trial TEXT NOT NULL, result TEXT NOT NULL, wall_s "
                "REAL NOT NULL)"
            )
            self._connection.execute("SELECT key, result, wall_s FROM trials LIMIT 1")
            self._connection.commit()
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path}: no store of trials ({error}); another --out is right") from (
                None
            )

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def get(self, key: str) -> tuple[dict[str, Any], float] | None:
        """Return a finished trial's result and wall time, or None."""
        row = self._connection.execute(
            "SELECT result, wall_s FROM trials WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else (json.loads(row[0]), float(row[1]))

    def put(
        self,
        key: str,
        experiment: str,
        trial: dict[str, Any],
        result: dict[str, Any],
        wall_s: float,
    ) -> None:
        """Store a finished trial."""
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?)",
                (
                    key, experiment, code_version(), json.dumps(trial), json.dumps(result), wall_s,
                ),
            )  # fmt: skip

    def forget(self, experiment: str) -> None:
        """Delete an experiment's trials."""
        with self._connection:
            self._connection.execute("DELETE FROM trials WHERE experiment = ?", (experiment,))
