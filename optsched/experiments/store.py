"""The durable store of finished trials: one SQLite file per experiment, one row per trial.

A store belongs to one experiment, its parameters, its seed and the code that ran it. A run that
differs in one of these is refused, so that results of different kinds never stand in one table.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from optsched import __version__
from optsched.costs.cost import models_folder
from optsched.experiments.base import Row, studies_folder
from optsched.files.read_write import example_instances
from optsched.problem.errors import InputError
from optsched.problem.instance import canonical_json
from optsched.problem.notes import warn

FILE = "results.sqlite"
"""Name of the store in an experiment's folder."""

APPLICATION_ID = 0x6F707473
"""The SQLite application id that marks the file as a store of optsched. It reads ``opts``."""

VERSION = 1
"""The version of the tables, which the file's header has as ``user_version``."""

WITHOUT_EFFECT = ("_data/", "cli/", "show/", "experiments/figures.py", "studies/drawing.py")
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

    They are the package's code and tables without `WITHOUT_EFFECT`, the studies, cost models and
    instances.
    """
    root, studies = Path(__file__).resolve().parents[1], studies_folder()
    files = [file for kind in ("*.py", "*.toml") for file in root.rglob(kind)]
    by_name = {file.relative_to(root).as_posix(): file for file in files}
    for file in studies.rglob("*.py"):
        by_name[f"studies/{file.relative_to(studies).as_posix()}"] = file

    by_name = {name: file for name, file in by_name.items() if not name.startswith(WITHOUT_EFFECT)}
    by_name |= {f"models/{file.name}": file for file in models_folder().glob("*.toml")}
    return by_name | {f"instances/{file.name}": file for file in example_instances().values()}


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

    def key(self, trial: Row) -> str:
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

    @property
    def row(self) -> Row:
        """The number, the parameters, the results and ``failed``."""
        return {"trial": self.trial, **self.parameters, **self.result, "failed": self.failed}


class Store:
    """Finished trials by number. What `put` has stored survives the end of the process."""

    def __init__(self, connection: sqlite3.Connection, identity: Identity) -> None:
        self._connection, self._identity = connection, identity

    def finished(self, wanted: Sequence[Row], place: object) -> dict[int, Record]:
        """Return the wanted trials that it has. `place`: where it is, for errors.

        One that has changed since is an error, but for the ``code`` of policies, with which it runs
        again.
        """
        stored = {k: record for k, record in _records(self._connection).items() if k < len(wanted)}
        for k, record in list(stored.items()):
            if record.parameters.get("code") != wanted[k].get("code"):
                del stored[k]
            elif record.key != self._identity.key(wanted[k]):
                raise InputError(
                    f"{place}: found trial {k} stored with other contents (has a file changed that "
                    "it is drawn from?); expected another --out, or --fresh"
                )

        return stored

    def put(
        self, trial: int, parameters: Row, result: Row | None, failed: str | None, wall_s: float
    ) -> Record:
        """Store a finished trial, and return it as a resumed run will read it."""
        texts = json.dumps(parameters), json.dumps(result or {})
        row = (trial, self._identity.key(parameters), *texts, failed, wall_s)
        self._connection.execute("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?)", row)
        return _record(row)


@contextmanager
def open_store(
    path: Path | None, identity: Identity, *, fresh: bool = False, retry_failed: bool = False
) -> Iterator[Store]:
    """Open the store of a run, which no other process can open for writing meanwhile.

    Every trial is on disk before `Store.put` returns (write-ahead log), and can be read at any
    time. Without a path trials are kept in memory. A database that is damaged, in use, or of
    another program, experiment, parameters or code is refused. With `fresh` its trials are deleted
    whatever they are of, with `retry_failed` those that have failed.
    """
    with ExitStack() as stack:
        if path is not None:
            # An empty database beside the store is locked. A process that ends lets it go, however
            # it ends, wherever the store works. Who finds it locked does not wait (0 seconds).
            stack.enter_context(_open(path.with_suffix(".lock"), 0)).execute("BEGIN EXCLUSIVE")

        connection = stack.enter_context(_open(path, _BUSY_S))
        is_new = _is_empty(path, connection)
        # Each transaction is on disk when it ends, even if the power fails then.
        connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL")
        connection.executescript("BEGIN IMMEDIATE;" + (_TABLES if is_new else ""))
        if fresh:
            connection.execute("DELETE FROM trials")
        # A store without trials belongs to no experiment yet, even if one has opened it.
        if connection.execute("SELECT count(*) FROM trials").fetchone()[0] == 0:
            rows = (
                (name, json.dumps(value, sort_keys=True)) for name, value in vars(identity).items()
            )
            connection.executemany("INSERT OR REPLACE INTO identity VALUES (?, ?)", rows)

        connection.execute("COMMIT")
        _check_identity(path, _identity(connection), identity)
        if retry_failed:
            connection.execute("DELETE FROM trials WHERE failed IS NOT NULL")

        yield Store(connection, identity)


def _check_identity(path: Path | None, stored: Identity, wanted: Identity) -> None:
    """Raise InputError if the stored trials do not belong to this run."""
    advice = "use another --out, or --fresh to delete its trials"
    of_code = "use that version to go on, --fresh to delete them, or another --out to keep both"
    stored_settings = {"seed": stored.seed, **stored.parameters}
    # The stored ones were written as JSON, in which tuples become lists, so ours pass through it.
    wanted_settings = {"seed": wanted.seed, **json.loads(json.dumps(wanted.parameters))}
    # What the trials are of or with, theirs and ours, and what to do about a difference.
    pairs: list[tuple[str, Any, Any, str]] = [("of", stored.experiment, wanted.experiment, advice)]
    for k in wanted_settings | stored_settings:
        settings = repr(stored_settings.get(k)), repr(wanted_settings.get(k))
        pairs.append((f"with {k} =", *settings, advice))

    pairs.append(("of optsched", stored.code, wanted.code, of_code))
    for what, found, expected, words in pairs:
        if found != expected:
            raise InputError(f"{path}: found trials {what} {found}; expected {expected} ({words})")

    if path is not None and stored.libraries != wanted.libraries:
        warn(
            f"{path.parent}: the trials stored there began with {stored.libraries}; the trials now "
            f"run with {wanted.libraries}",
            stacklevel=5,
        )


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

        return _identity(connection), [*_records(connection).values()]


@contextmanager
def _open(path: Path | None, busy_s: float, mode: str = "") -> Iterator[sqlite3.Connection]:
    """Yield a database, which is closed in the end, and have its errors in one line."""
    name = ":memory:" if path is None else f"{path.absolute().as_uri()}{mode}"
    with _in_one_line(path):
        # Without an isolation level transactions begin only where a statement says so.
        connection = sqlite3.connect(name, timeout=busy_s, isolation_level=None, uri=True)
        with closing(connection):
            yield connection


def _record(row: tuple[Any, ...]) -> Record:
    """Return a row of the table of trials."""
    number, key, parameters, result, failed, wall_s = row
    return Record(number, key, json.loads(parameters), json.loads(result), failed, wall_s)


def _records(connection: sqlite3.Connection) -> dict[int, Record]:
    """Return all trials by number, in order."""
    rows = connection.execute("SELECT * FROM trials ORDER BY trial")
    return {row[0]: _record(row) for row in rows}


def _identity(connection: sqlite3.Connection) -> Identity:
    rows = connection.execute("SELECT name, value FROM identity")
    return Identity(**{name: json.loads(value) for name, value in rows})


def _is_empty(path: Path | None, connection: sqlite3.Connection) -> bool:
    """Return whether the database is still empty. One that is not a store is an error."""

    def value_of(statement: str) -> Any:
        return connection.execute(statement).fetchone()[0]

    # A new file has neither an id, nor a version, nor tables.
    program, version = value_of("PRAGMA application_id"), value_of("PRAGMA user_version")
    if (program, version, value_of("SELECT count(*) FROM sqlite_master")) == (0, 0, 0):
        return True
    if program != APPLICATION_ID:
        raise InputError(f"{path}: found another program's database; use another --out")
    if version != VERSION:
        raise InputError(
            f"{path}: found a store of version {version}; expected version {VERSION} (use another "
            "--out)"
        )

    # A database whose pages are damaged may still open.
    damage = value_of("PRAGMA quick_check(1)")
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)

    return False


# What errors of SQLite mean, by the first letters of their names.
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


@contextmanager
def _in_one_line(path: Path | None) -> Iterator[None]:
    """Turn the errors of SQLite into one line that says what to do."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        name = str(getattr(error, "sqlite_errorname", ""))
        meaning = next(text for names, text in _MEANINGS.items() if name.startswith(names))
        text = f"{path}: {meaning.format(' '.join(str(error).split()))}"
        raise InputError(text) from None
