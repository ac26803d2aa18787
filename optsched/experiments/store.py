"""The durable store of finished trials: one SQLite file per experiment, one row per trial.

A store belongs to one experiment, its parameters, its seed and the code that ran it. A run that
differs in one of these is refused, so that results of different kinds never stand in one table.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from optsched import __version__
from optsched.costs.cost import models_folder
from optsched.experiments.registry import studies_folder
from optsched.files.read_write import example_instances
from optsched.problem.errors import InputError
from optsched.problem.instance import canonical_json

FILE = "results.sqlite"
"""Name of the store in an experiment's folder."""

APPLICATION_ID = 0x6F707473
"""The SQLite application id that marks the file as a store of optsched. It reads ``opts``."""

VERSION = 1
"""The version of the tables, which the file's header has as ``user_version``."""

WITHOUT_EFFECT = ("_data", "cli", "show", "experiments/figures.py")
"""Folders and files whose code no trial runs. They may change while an experiment goes on."""

LIBRARIES = ("highspy", "numba", "numpy", "ortools")

_BUSY_S = 10.0
_TABLES = f"""
    PRAGMA application_id={APPLICATION_ID};
    PRAGMA user_version={VERSION};
    CREATE TABLE identity (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE trials (trial INTEGER PRIMARY KEY, key TEXT NOT NULL, parameters TEXT NOT NULL,
                         result TEXT NOT NULL, failed TEXT, wall_s REAL NOT NULL);
"""


def counted_files() -> dict[str, Path]:
    """Return the files on which a trial's result may depend, by name.

    They are the package's sources without those of `WITHOUT_EFFECT`, the studies, and the shipped
    cost models and instances.
    """
    root = Path(__file__).resolve().parents[1]
    studies = studies_folder()
    sources = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    return {
        **{n: f for n, f in sources.items() if not {n, n.split("/")[0]} & set(WITHOUT_EFFECT)},
        **{f"studies/{f.relative_to(studies).as_posix()}": f for f in studies.rglob("*.py")},
        **{f"models/{file.name}": file for file in models_folder().glob("*.toml")},
        **{f"instances/{file.name}": file for file in example_instances().values()},
    }


def version_of(files: Mapping[str, Path]) -> str:
    """Return the version of optsched followed by a digest of the files."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")

    return f"{__version__}+{digest.hexdigest()[:12]}"


@cache
def code_version() -> str:
    """Return the version of optsched followed by a digest of `counted_files`."""
    return version_of(counted_files())


def libraries() -> str:
    """Return the versions of the libraries that a result may depend on."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)


@dataclass(frozen=True, eq=False)
class Identity:
    """The properties that all trials of a store share; see `code_version` and `libraries`."""

    experiment: str
    parameters: Mapping[str, Any]
    seed: int
    code: str
    libraries: str

    def key(self, trial: Mapping[str, Any]) -> str:
        """Return a digest that identifies a trial: of the experiment, the trial and the code."""
        data = {"experiment": self.experiment, "trial": trial, "code": self.code}
        return hashlib.sha256(canonical_json(data)).hexdigest()


class Record(NamedTuple):
    """A finished trial: its number, its `Identity.key`, and its result or the reason for none."""

    trial: int
    key: str
    parameters: dict[str, Any]
    result: dict[str, Any]
    failed: str | None
    wall_s: float


class Store:
    """Finished trials by number. Trials that `put` has stored survive the end of the process.

    Every trial is a transaction in write-ahead-log mode, and on disk before `put` returns. While a
    store is open, no other process can open it for writing, but `read` and other readers can read
    it.

    Without a path the trials are kept in memory. ``fresh`` deletes the trials that the store has,
    whichever experiment they belong to. InputError is raised for a database of another program or
    version, for one that is damaged, in use or cannot be written, and for trials of another
    experiment, of other parameters or of other code.
    """

    def __init__(self, path: Path | None, identity: Identity, *, fresh: bool = False) -> None:
        self._path, self._identity = path, identity
        with ExitStack() as opened:
            if path is not None:
                # An empty database beside the store is locked. A process that ends lets it go,
                # however it ends, wherever the store works.
                opened.enter_context(_open(path.with_suffix(".lock"), 0)).execute("BEGIN EXCLUSIVE")

            self._connection = opened.enter_context(_open(path, _BUSY_S))
            self._prepare(fresh)
            self._opened = opened.pop_all()

    def _prepare(self, fresh: bool) -> None:
        connection = self._connection
        new = _is_empty(self._path, connection)
        # Each transaction is on disk when it ends, even if the power fails then.
        connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL")
        connection.executescript("BEGIN IMMEDIATE;" + (_TABLES if new else ""))

        if fresh:
            connection.execute("DELETE FROM trials")
        # A store without trials belongs to no experiment yet, even if one has opened it.
        if connection.execute("SELECT count(*) FROM trials").fetchone()[0] == 0:
            for name, value in vars(self._identity).items():
                text = json.dumps(value, sort_keys=True)
                connection.execute("INSERT OR REPLACE INTO identity VALUES (?, ?)", (name, text))

        connection.execute("COMMIT")
        self._compare(_identity(connection))

    def _compare(self, stored: Identity) -> None:
        """Raise InputError if the stored trials do not belong to this run."""
        wanted, path = self._identity, self._path
        right = "use another --out, or --fresh to delete its trials"
        if stored.experiment != wanted.experiment:
            raise InputError(
                f"{path}: found trials of {stored.experiment}; expected {wanted.experiment} "
                f"({right})"
            )

        theirs = {"seed": stored.seed, **stored.parameters}
        ours = {"seed": wanted.seed, **json.loads(json.dumps(wanted.parameters))}
        for name in (*ours, *theirs):
            if theirs.get(name) != ours.get(name):
                raise InputError(
                    f"{path}: found trials with {name} = {theirs.get(name)}; expected "
                    f"{ours.get(name)} ({right})"
                )

        if stored.code != wanted.code:
            raise InputError(
                f"{path}: found trials of optsched {stored.code}; expected {wanted.code} "
                "(use that version to go on, --fresh to delete them, or another --out to keep both)"
            )

    @property
    def libraries(self) -> str:
        """The versions of the libraries with which the store was begun."""
        return _identity(self._connection).libraries

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def records(self) -> dict[int, Record]:
        """Return the finished trials by number."""
        with _one_line(self._path):
            return _records(self._connection)

    def put(
        self,
        trial: int,
        parameters: Mapping[str, Any],
        result: Mapping[str, Any] | None,
        failed: str | None,
        wall_s: float,
    ) -> Record:
        """Store a finished trial, and return it as a resumed run will read it."""
        texts = json.dumps(parameters), json.dumps(result or {})
        row = (trial, self._identity.key(parameters), *texts, failed, wall_s)
        with _one_line(self._path):
            self._connection.execute("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?)", row)

        return _record(row)

    def forget_failed(self) -> None:
        """Delete the trials that failed, so that they run again."""
        with _one_line(self._path):
            self._connection.execute("DELETE FROM trials WHERE failed IS NOT NULL")


def read(folder: str | Path) -> tuple[Identity, list[Record]]:
    """Return the identity and the trials in an experiment's folder, even while it runs."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise InputError(f"{folder}: found no {FILE}; expected the folder of an experiment")

    # Without a log no process writes. Then the store can be read from a read-only folder too.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    with _open(path, _BUSY_S, f"?{mode}") as connection:
        if _is_empty(path, connection):
            raise InputError(f"{path}: found an empty store; expected one with an experiment")

        found = _records(connection)
        return _identity(connection), [found[number] for number in sorted(found)]


@contextmanager
def _open(path: Path | None, busy_s: float, mode: str = "") -> Iterator[sqlite3.Connection]:
    """Yield a database, which is closed in the end, and have its errors in one line."""
    name = ":memory:" if path is None else f"{path.absolute().as_uri()}{mode}"
    with _one_line(path):
        connection = sqlite3.connect(name, timeout=busy_s, isolation_level=None, uri=True)
        with closing(connection):
            yield connection


def _record(row: tuple[Any, ...]) -> Record:
    number, key, parameters, result, failed, wall_s = row
    return Record(number, key, json.loads(parameters), json.loads(result), failed, wall_s)


def _records(connection: sqlite3.Connection) -> dict[int, Record]:
    return {row[0]: _record(row) for row in connection.execute("SELECT * FROM trials")}


def _identity(connection: sqlite3.Connection) -> Identity:
    rows = connection.execute("SELECT name, value FROM identity")
    return Identity(**{name: json.loads(value) for name, value in rows})


def _is_empty(path: Path | None, connection: sqlite3.Connection) -> bool:
    """Return whether the database is still empty. One that is not a store is an error."""

    def value(statement: str) -> Any:
        return connection.execute(statement).fetchone()[0]

    program, version = value("PRAGMA application_id"), value("PRAGMA user_version")
    if (program, version, value("SELECT count(*) FROM sqlite_master")) == (0, 0, 0):
        return True
    if program != APPLICATION_ID:
        raise InputError(f"{path}: found another program's database; use another --out")
    if version != VERSION:
        raise InputError(
            f"{path}: found a store of version {version}; expected version {VERSION} (use another "
            "--out)"
        )

    damage = value("PRAGMA quick_check(1)")
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)

    return False


_MEANINGS = {
    ("SQLITE_BUSY", "SQLITE_LOCKED"): (
        "another process is using it; wait for its end, or use another --out"
    ),
    ("SQLITE_FULL", "SQLITE_IOERR"): (
        "{}; stored trials are safe, and the same command goes on once the disk has space"
    ),
    ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH"): (
        "cannot be written ({}); use another --out"
    ),
    ("SQLITE_NOTADB",): "found no SQLite database in the file; use another --out",
    ("",): "found damage ({}); use a copy of it, or another --out",
}
"""What errors of SQLite mean, by the first letters of their names."""


@contextmanager
def _one_line(path: Path | None) -> Iterator[None]:
    """Turn the errors of SQLite into one line that says what to do."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        name = str(getattr(error, "sqlite_errorname", ""))
        meaning = next(text for names, text in _MEANINGS.items() if name.startswith(names))
        text = f"{path}: {meaning.format(' '.join(str(error).split()))}"
        raise InputError(text) from None
