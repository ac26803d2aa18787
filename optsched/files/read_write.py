"""Instance and schedule files, and what all JSON files of optsched share.

Reading is strict: files are UTF-8, without NaN, Infinity, duplicate keys or unknown fields. Every
error is one line that begins with the file. Writing is atomic: an interrupted write leaves the
old file. A file whose name ends in ``.gz`` is compressed with gzip.
"""

import hashlib
import io
import os
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from optsched.files.library import PREFIX, instance_file, read_library, shipped_folder
from optsched.files.outputs import write_bytes
from optsched.files.strict_json import (
    Place,
    check_format,
    json_text as json_text,
    read_json,
    stem,
    write_json,
)
from optsched.problem.columns import real_column, whole_column
from optsched.problem.errors import InputError, check_kind, meant, named
from optsched.problem.forecast import Forecast
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import ALL_COLUMNS, TIMES, EvictMode, Schedule, check_columns
from optsched.problem.text_files import reason

# Largest number in a schedule's columns. Starts may lie after the latest arrival allowed.
_LARGEST = 2**60

INLINE_ENTRIES = 2_000_000
"""Maximum number of entries of a schedule whose columns belong inside the JSON file."""


def read_instance(path: str | Path) -> Instance:
    """Return the instance in a file, or a shipped one by name.

    Parameters
    ----------
    path : str or Path
        A ``.json`` or ``.json.gz`` file. If there is no such file, a name in
        `example_instances`, or ``library/NAME`` for an instance of the library. An instance
        without a ``name`` is named after its file.

    Raises
    ------
    InputError
        The file cannot be read, does not hold an instance, or holds an impossible one. The error
        is one line that begins with the file.
    """
    file = named_instance(path)
    if not os.path.exists(file):
        shipped = ", ".join(example_instances())
        raise InputError(
            f"{path}: no such file; {meant(str(path), example_instances())}expected a file or one "
            f"of {shipped}, or library/NAME (`optsched list library`)"
        )

    data = read_json(file, expect="instance")
    with Place(file):
        return instance_from_dict(data, name=stem(file))


def as_instance(given: Instance | str | Path) -> Instance:
    """Return the instance that a public function was given: itself, or a name or a file of it.

    Parameters
    ----------
    given : Instance, str or Path
    """
    if isinstance(given, (str, Path)):
        return read_instance(given)

    check_kind("instance", given, Instance, "an Instance, its file, or the name of a shipped one")
    return given


def instance_from_dict(data: dict[str, Any], *, name: str) -> Instance:
    """Return the instance that a JSON object holds."""
    # The schema has the fields of an `Instance` and no others; columns are under "requests".
    fields = {**data, **data["requests"], "limits": Limits(**(data.get("limits") or {}))}
    for key in ("format", "version", "requests"):
        del fields[key]

    if fields.get("forecast") is not None:
        fields["forecast"] = Forecast(**fields["forecast"])
    if fields.get("name") is None:
        fields["name"] = name

    return Instance(**fields)


def write_instance(instance: Instance | str | Path, path: str | Path) -> None:
    """Write an instance file.

    Parameters
    ----------
    instance : Instance, str or path
        The instance, its file, or the name of a shipped one.
    path : str or Path
        A ``.json`` or ``.json.gz`` file.
    """
    instance = as_instance(instance)
    write_json(instance.to_dict(), path)


def read_schedule(path: str | Path, instance: Instance | None = None) -> Schedule:
    """Return the schedule in a file. `optsched.evaluate` says whether it is feasible.

    Parameters
    ----------
    path : str or Path
        A ``.json`` or ``.json.gz`` file, with its columns inside or in a Parquet file beside it.
    instance : Instance, optional
        Instance that the schedule must be for, if the file has an instance's digest.

    Raises
    ------
    InputError
        The file cannot be read, does not hold a schedule, or holds one of another instance. The
        error is one line that begins with the file.
    """
    file = Path(path)
    data = read_json(file, expect="schedule")
    with Place(file):
        return schedule_from_dict(data, instance, folder=file.parent)


def schedule_from_dict(
    data: dict[str, Any], instance: Instance | None = None, *, folder: Path | None = None
) -> Schedule:
    """Return the schedule of a JSON object, whose columns may be in a Parquet file of `folder`."""
    check_format(data, "schedule")
    digest = data.get("instance_sha256")
    if instance is not None:
        instance.check_digest(digest, "instance_sha256")

    kind = data["kind"]
    columns = _columns_in(data, folder)
    for name in columns:
        if (name == "starts") != (kind == "starts"):
            raise InputError(f"{name}: expected no such column in a schedule of kind {kind!r}")

    # Without evictions both modes mean the same, and files need not say one.
    mode: EvictMode | None = data.get("evict_mode")
    if mode is None and len(columns.get("evicted", [])):
        raise InputError("evict_mode: found nothing; expected 'restart' or 'recompute'")

    times = {name: _start_column(columns.pop(name, None), name, instance) for name in TIMES}
    schedule = Schedule(
        kind=kind,
        **{
            name: whole_column(column, name, -_LARGEST, _LARGEST, item="entry")
            for name, column in columns.items()
        },
        **times,
        evict_mode=mode or ("restart" if kind == "starts" else "recompute"),
        instance_sha256=digest if instance is None else instance.sha256,
        cost_model_sha256=data.get("cost_model_sha256"),
    )
    check_columns(schedule)
    return schedule


def _columns_in(data: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return a schedule's columns, unchecked: those of the JSON object, or of its Parquet file."""
    columns = {name: data[name] for name in ALL_COLUMNS if data.get(name) is not None}
    beside = data.get("columns")
    if beside is None:
        return columns
    if columns:
        raise InputError(f"{next(iter(columns))}: found here and in {beside}; expected one place")
    if folder is None:
        raise InputError(
            f"columns: found {beside!r}, which can only be read beside its file; expected columns "
            "inside"
        )

    return _read_parquet(folder / beside, data.get("columns_sha256"))


def write_schedule(
    schedule: Schedule, path: str | Path, *, columns: Literal["json", "parquet"] = "json"
) -> None:
    """Write a schedule file.

    Parameters
    ----------
    schedule : Schedule
    path : str or Path
        A ``.json`` or ``.json.gz`` file.
    columns : {"json", "parquet"}
        Where the columns go: into the file, or into ``STEM.columns.parquet`` beside it. The file
        then names the Parquet file and its digest. The Parquet file has one row, whose cells are
        the columns as lists, since their lengths differ.

    Raises
    ------
    InputError
        The file cannot be written, ``columns`` is neither of the two, or pyarrow is missing for
        ``"parquet"``.
    """
    check_kind("schedule", schedule, Schedule, "an optsched.Schedule")
    if columns not in ("json", "parquet"):
        raise InputError(f"columns: found {columns!r}; expected 'json' or 'parquet'")

    data = schedule.to_dict()
    if columns == "parquet":
        beside = columns_file(path)
        present = {name: data.pop(name) for name in ALL_COLUMNS if data.get(name) is not None}
        content = _parquet_bytes(present)
        write_bytes(content, beside)
        data |= {"columns": beside.name, "columns_sha256": hashlib.sha256(content).hexdigest()}

    write_json(data, path)


def columns_file(path: str | Path) -> Path:
    """Return the Parquet file beside a schedule file that holds its columns."""
    file = Path(path)
    return file.with_name(f"{stem(file)}.columns.parquet")


def example_instances() -> dict[str, Path]:
    """Return the file of each shipped instance by name, sorted by name, without the library's."""
    return {stem(file): file for file in sorted(shipped_folder().glob("*.json*"))}


def named_instance(path: str | Path) -> Path:
    """Return the file that a text means: a file, or a shipped instance, or one of the library."""
    file, text = Path(path), str(path)
    if os.path.isfile(file):
        return file
    if text.startswith(PREFIX):
        file = instance_file(text.removeprefix(PREFIX))
        return file if file.is_file() else Path(path)

    return example_instances().get(text, file)


def shipped_instance(digest: object) -> Instance | None:
    """Return the shipped instance of a digest, if there is one."""
    for file in example_instances().values():
        if (found := read_instance(file)).sha256 == digest:
            return found

    for name, entry in read_library()["instances"].items():
        if entry["instance_sha256"] == digest:
            return read_instance(instance_file(name))

    return None


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a file format.

    Parameters
    ----------
    name : str
        A format, such as ``instance``.
    """
    from optsched.files import schemas  # pydantic is only loaded where files are read

    named("schema:", name, schemas.MODELS)
    return schemas.schema(name)


def _start_column(values: Any, name: str, instance: Instance | None) -> NDArray[Any] | None:
    """Return a column of times: integers in rounds, floats in seconds.

    Without an instance the values show it.
    """
    if values is None:
        return None

    item = "batch" if name == "start" else "move"
    if instance is None:
        in_rounds = all(type(v) is int for v in values)
    else:
        in_rounds = instance.in_rounds
    if in_rounds:
        return whole_column(values, name, -_LARGEST, _LARGEST, item=item)

    return real_column(values, name, -float(_LARGEST), float(_LARGEST), item=item)


def _parquet_bytes(columns: dict[str, list[float]]) -> bytes:
    """Return the bytes of a Parquet file with one row, whose cells are the columns as lists."""
    pa, pq = _pyarrow("'parquet'", "install pyarrow, or write the columns as 'json'")
    kinds = {name: pa.list_(pa.float64() if name in TIMES else pa.int64()) for name in columns}
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([columns], pa.schema(kinds)), sink, compression="zstd")

    return sink.getvalue()


def _pyarrow(what: str, advice: str) -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(
            f"columns: {what} needs pyarrow, which is not installed; {advice}"
        ) from None

    return pa, pq


def _read_parquet(file: Path, digest: str | None) -> dict[str, Any]:
    """Return the columns in a file of `write_schedule`: one row, whose cells are lists."""
    pa, pq = _pyarrow(repr(file.name), "install pyarrow")
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:  # a name with a NUL character is a ValueError
        raise InputError(
            f"columns: expected {file.name!r} beside this file; it cannot be read ({reason(error)})"
        ) from None

    found = hashlib.sha256(content).hexdigest()
    if digest not in (None, found):
        raise InputError(
            f"columns_sha256: found {found} of {file.name!r}; expected {digest}, of the file that "
            "was written with this one"
        )

    try:
        table = pq.read_table(io.BytesIO(content))
    except pa.ArrowException as error:
        raise InputError(f"columns: {file.name!r}: expected a Parquet file; {error}") from None

    unknown = [name for name in table.column_names if name not in ALL_COLUMNS]
    if unknown or table.num_rows != 1:
        raise InputError(
            f"columns: {file.name!r}: found {table.num_rows} rows of "
            f"{', '.join(table.column_names)}; expected one row of {', '.join(ALL_COLUMNS)}"
        )

    columns = {name: table.column(name)[0] for name in table.column_names}
    for name, cell in columns.items():
        if not pa.types.is_list(cell.type) or cell.values is None or cell.values.null_count:
            raise InputError(
                f"columns: {file.name!r}: {name}: found {cell.type}; expected a list of numbers"
            )

    return {name: cell.values.to_numpy(zero_copy_only=False) for name, cell in columns.items()}
