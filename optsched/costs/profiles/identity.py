"""What the rows of a profile are: device, model, parallelism, types, window, kind of layer.

Every source's rows pass through `Claim.read`. Columns that identify are known by name, wherever
they stand. Their values have to agree with what was asked for, and say what was not asked for. What
is wanted of a column (`Wanted`) is a set of its values, and the words that errors have for these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.costs.architectures import (
    Architecture,
    architecture,
    check_dense,
    known,
    same_architecture,
)
from optsched.costs.devices import DEVICES, Device, device, devices_named
from optsched.costs.profiles.tables import PARTS, Measurements, Profile, Rejected, Table, read_table
from optsched.problem.errors import InputError, some
from optsched.problem.text_files import read_toml

if TYPE_CHECKING:
    import pandas as pd

    Frame = pd.DataFrame

DEFAULT_DEVICE = "a100-80gb"
KINDS = read_toml(Path(__file__).with_name("columns.toml"), "kinds of columns")
"""What columns that identify tell, and how they are recognised."""
FEW = 12
"""Maximum number of different values of an unknown column that may identify."""

Wanted = tuple[set[Any], str] | None
"""The values of a column that are wanted, and what errors call them. None: all of them."""


class _Column(NamedTuple):
    """A column of a file and its different values."""

    file: Path
    name: str
    values: list[Any]

    def error(self, expected: str, found: Collection[Any] | None = None) -> InputError:
        """Return an error that names the values found, by default all of the column's."""
        values = _list(self.values if found is None else list(found))
        return InputError(f"{self.file}: {self.name}: found {values}; expected {expected}")

    def among(self, words: Collection[str]) -> set[Any]:
        """Return the values that are one of some words."""
        return {value for value in self.values if str(value).lower() in words}


@dataclass
class Claim:
    """What a profile is asked to be, and what its files say that it is.

    None stands for what was not asked for, until a file tells it. ``degree`` is that of tensor
    parallelism. ``asked`` is a device's name that may mean several, and ``only`` has the values of
    columns without which no row is wanted. ``met`` has the names of these columns that a file has,
    and ``device`` if a file named it. ``same`` has the one value of columns that are constant in a
    profile. ``notes``, ``rejected`` and ``shape`` become those of the `Profile`.
    """

    model: str | None = None
    degree: int | None = None
    device: Device | None = None
    asked: str = ""
    link_gb_s: float | None = None
    only: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    same: dict[str, str] = field(default_factory=dict)
    shape: Architecture = field(init=False)

    def read(
        self,
        file: Path,
        needed: Sequence[str],
        *,
        exact: Mapping[str, Any] | None = None,
        also_known: Iterable[str] = (),
    ) -> Frame:
        """Return the rows of a file that are what was asked for, or raise InputError if none is.

        ``exact`` has values that columns must have if the file has them: the operator, and sizes
        of the model. Beside ``needed``, the reader understands the columns ``also_known``.
        """
        rows = read_table(file, needed)
        used, left_out = self._matching(file, rows, exact or {})
        words = "; left out are " + ", ".join(left_out) if left_out else ""
        self.notes.append(f"{file.name}: {len(used)} of {len(rows)} rows are used{words}")

        # Unknown columns of few values may tell kinds of rows apart.
        understood = {*needed, *also_known, *(exact or {}), "line"}
        for name in used.columns:
            if name in understood or kind_of(name) or used[name].dtype.kind == "f":
                continue  # fractions are measured, and tell no kinds apart

            values = _values(used, name)
            if 1 < len(values) <= FEW:
                self.notes.append(
                    f"{file.name}: {name} is {_list(values, short=True)}, and rows of all of them "
                    f"are used (--only {name}=VALUE takes one)"
                )

        return used

    def check(self, file: Path, facts: Mapping[str, Any]) -> None:
        """Apply the rules for rows to what a file says of the whole profile, by name of column.

        InputError is raised if it is not what was asked for. What was not asked for is filled in:
        device, model and degree.
        """
        import pandas as pd

        # It is a table of one row, which fits or is an error, so there are no rows to return.
        self._matching(file, pd.DataFrame([dict(facts)]), {})

    def _matching(
        self, file: Path, rows: Frame, exact: Mapping[str, Any]
    ) -> tuple[Frame, list[str]]:
        """Return the rows that are wanted, and how many were left out for which values.

        ``exact`` as in `read`: values that columns must have if the file has them.
        """
        left_out = []
        # Whether times are in microseconds, which decides what a column of units must say.
        micro = any(str(column).endswith("_us") for column in rows)
        # What is chosen by hand comes first: it may leave a single engine or device. It does not
        # make rows of another kind right, so all rules follow.
        chosen = [name for name in self.only if name in rows]
        self.met.update(chosen)

        for k, name in enumerate([*chosen, *rows.columns]):
            # The values of the rows that the columns before have left.
            column = _Column(file, name, _values(rows, name))
            wanted: Wanted = None  # a column that identifies nothing keeps all of its values
            if k < len(chosen):
                text = self.only[name]
                equal = {value for value in column.values if str(value) == text}
                wanted = equal, f"{text!r}, as asked for"
            elif column.values:
                wanted = self._wanted(column, exact, micro)
            if wanted is None:
                continue

            fits, expected = wanted
            if not fits:
                raise column.error(expected)

            keep = rows[name].isin(fits - {None})
            if None in fits:  # which stands for an empty cell
                keep |= rows[name].isna()
            if not keep.all():
                others = [value for value in column.values if value not in fits]
                left_out.append(f"{int((~keep).sum())} with {name} {_list(others, short=True)}")
                rows = rows[keep]

        return rows, left_out

    def find_shape(self, place: Path, *, experts: bool = False) -> Architecture:
        """Return the model's architecture, which may have experts if so said.

        Errors begin with the place of the profile.
        """
        try:
            self.shape = architecture(self.model or "")
        except InputError as error:
            raise InputError(f"{place}: {error} (--model)") from None

        if not experts:
            check_dense(self.shape, place)

        return self.shape

    def measured(self, folder: Path, frames: Mapping[Path, Frame]) -> list[Measurements]:
        """Return the rows of the files of a folder, once all are read and the shape is known."""
        peak, degree = self._peak(folder), self.degree or 1
        return [
            Measurements(file, frame, self.shape, degree, peak, self.rejected)
            for file, frame in frames.items()
        ]

    def _peak(self, folder: Path) -> Device:
        """Return the device that was profiled, as asked for, or as the files or folders name it."""
        # The innermost folder that names a known device says which it is, unless it is known.
        whole = folder.resolve()
        for part in [whole, *whole.parents][:5]:  # a profile's tree is no deeper
            named = devices_named(part.name)
            if not named or self.device in named or self.asked:
                continue  # it names none, or the same, or what was asked for decides
            if self.device is not None:
                if "device" not in self.met:  # files know better than folders
                    self.notes.append(f"the folder {part.name} names another device")

                break

            usual = [d for d in named if d.name == DEFAULT_DEVICE]
            self.device = usual[0] if usual else device(part.name)
            self.notes.append(f"the device is {self.device.name}, as the folder {part.name} says")

        if self.device is None and not self.asked:
            self.notes.append(f"no file names the device, which is taken to be {DEFAULT_DEVICE}")

        peak = self.device or device(self.asked or DEFAULT_DEVICE)
        self.device = peak if self.link_gb_s is None else replace(peak, link_gb_s=self.link_gb_s)
        return self.device

    def profile(
        self, source: str, tables: Sequence[Table], files: str | Mapping[str, str], **grids: Any
    ) -> Profile:
        """Return the profile, once it is `measured`. ``files`` may be one place of all parts."""
        assert self.device is not None
        return Profile(
            source,
            self.shape,
            self.degree or 1,
            self.device,
            tuple(tables),
            tuple(self.rejected),
            tuple(self.notes),
            dict.fromkeys(PARTS, files) if isinstance(files, str) else files,
            **grids,
        )

    def check_only(self, folder: Path) -> None:
        """Raise InputError if a column of ``only`` was in no file."""
        for name in self.only:
            if name not in self.met:
                raise InputError(
                    f"{folder}: only: found no column {name!r}; expected one of its files"
                )

    def _wanted(self, column: _Column, exact: Mapping[str, Any], micro: bool) -> Wanted:
        """Return which of a column's values are wanted; None if it does not identify.

        ``exact`` as in `read`. ``micro``: whether the file's times are in microseconds, by the
        names of their columns.
        """
        # A kind is a table of ``columns.toml``: for most with the words that are wanted.
        kind = kind_of(column.name)
        about: Mapping[str, Any] = KINDS.get(str(kind), {})
        if column.name in exact:  # a number and its text are the same
            wanted = exact[column.name]
            whose = "" if isinstance(wanted, str) else f" ({self.model}, degree {self.degree or 1})"
            equal = {v for v in column.values if v == wanted or str(v) == str(wanted)}
            return equal, f"{wanted!r}{whose}"

        if kind == "device":
            return self._of_device(column)
        if kind == "model":
            return self._of_model(column)
        if kind == "degree":
            return self._of_degree(column)
        if kind == "type":
            return _of_sixteen_bit(column, about)
        if kind == "unit":
            units = about["microseconds" if micro else "milliseconds"]
            return column.among(units), f"{units[0]}, as its times are"
        if "values" in about:
            return column.among(about["values"]), about["expected"]
        if kind == "constant":
            self._check_constant(column)

        return None

    def _of_device(self, column: _Column) -> Wanted:
        """Return the values that mean the device, which the column tells if nobody has."""
        # A value such as ``cuda:0`` names no device.
        nameless = re.compile(KINDS["device"]["nameless"])
        named = [v for v in column.values if not nameless.fullmatch(str(v).lower())]
        if not named:
            return None

        self.met.add("device")
        if self.device is None:
            self.device = _one_device(column._replace(values=named), self.asked)
            where = f"{column.file.name}: {column.name}: found {_list(named)}"
            self.notes.append(f"{where}; the device is {self.device.name}")

        wanted = self.device.name

        def fits(value: Any) -> bool:
            meant = [device.name for device in devices_named(str(value))]
            if wanted == "cpu":  # a processor may be called anything that is no GPU
                return str(value) == wanted or not meant

            # So may a device of one's own, even like a known one.
            return wanted in meant or wanted not in DEVICES

        return set(filter(fits, column.values)), f"{wanted!r}, or another --gpu"

    def _of_model(self, column: _Column) -> Wanted:
        """Return the values that mean the model, which the column tells if nobody has."""
        if self.model is None:
            if len(column.values) > 1:
                raise column.error("--model with one of them")

            self.model = str(column.values[0])

        model = self.model
        # What a configuration of one's own describes may be called anything that is not known.
        is_config = Path(model).suffix == ".json" or (Path(model) / "config.json").is_file()

        def fits(value: Any) -> bool:
            text = str(value)
            return same_architecture(text, model) or (is_config and known(text) is None)

        return set(filter(fits, column.values)), f"{model!r}, or another --model"

    def _of_degree(self, column: _Column) -> Wanted:
        """Return the values that are the degree, which is 1 or the only one if nobody has said."""
        numbers = {value: _whole(value) for value in column.values}
        degrees = sorted({*numbers.values()} - {0}) or [1]  # 0: no degree (`_whole`)
        if self.degree is None:
            if len(degrees) > 1 and 1 not in degrees:
                raise column.error("--tensor-parallel with one of them", degrees)

            self.degree = 1 if 1 in degrees else degrees[0]

        fits = {value for value, number in numbers.items() if number == self.degree}
        return fits, f"{self.degree}, or another --tensor-parallel"

    def _check_constant(self, column: _Column) -> None:
        """Check that a column has one value, and note it; in another file it may be another."""
        file, name, values = column
        if len(values) > 1:
            raise column.error(f"one of them, as in --only {name}={values[0]}")

        text = str(values[0])
        if name not in self.same:
            self.same[name] = text
            self.notes.append(f"{name} {text}")
        elif self.same[name] != text:
            self.notes.append(f"{file.name}: {name} {text}, and not {self.same[name]}")


def _of_sixteen_bit(column: _Column, about: Mapping[str, Any]) -> Wanted:
    """Return the values that mean 16-bit floats: the plain words if there are some, or `half`.

    Rows of float16 are used only where there is no bfloat16 or a word such as ``auto``, so that
    rows of both are not mixed. `about`: the table of types in ``columns.toml``.
    """
    texts = {value: _type(value) for value in column.values}
    other = re.compile(about["other"])
    if column.name == "variant" and not any(map(other.search, texts.values())):
        return None  # it may be any word, and not a type

    plain, half = about["sixteen_bit"]
    present = {*texts.values()}
    words = half if present & {*half} and not present & {*plain} else plain
    fits = {value for value, text in texts.items() if text in words}
    return fits, f"{words[0]}, since no other is priced"


def kind_of(column: Any) -> str | None:
    """Return what a column tells if it identifies: a key of `KINDS`, however it is written."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(column)).lower()  # deviceName is device_name
    plain = re.sub(r"[^a-z0-9]+", "_", words).strip("_")
    return next((kind for kind, of in KINDS.items() if re.fullmatch(of["names"], plain)), None)


def _one_device(column: _Column, asked: str) -> Device:
    """Return the device that a column names; of several, the one asked for or the default.

    `asked`: a name that may mean several devices, or an empty text. The column has to name one of
    these; if it may mean several of them, too, `device` takes the usual one or refuses the name.
    """
    # By value of the column: the known devices that it may mean.
    named = {value: devices_named(str(value)) for value in column.values}
    if asked:
        both = [d for d in devices_named(asked) if any(d in meant for meant in named.values())]
        if not both:
            raise column.error(repr(asked))

        return both[0] if len(both) == 1 else device(asked)

    # A value that means no known device counts by its own name.
    names = {meant[0].name if meant else str(value) for value, meant in named.items()}
    if len(column.values) > 1 and DEFAULT_DEVICE in names:
        return DEVICES[DEFAULT_DEVICE]
    if len(names) > 1:
        raise column.error("--gpu with one of them")

    try:
        return device(str(column.values[0]))
    except InputError as error:
        reason = str(error).removeprefix("device: ")
        raise InputError(f"{column.file}: {column.name}: {reason} (--gpu)") from None


def _values(rows: Frame, name: str) -> list[Any]:
    """Return the different values of a column, with None for an empty cell at the end.

    Return none if the column has no value at all, or lists, which identify nothing.
    """
    column = rows[name]
    if column.isna().all() or column.map(lambda value: isinstance(value, (list, dict))).any():
        return []

    # Texts and numbers cannot be compared with each other, so the type comes first.
    values = sorted(column.dropna().unique().tolist(), key=lambda value: (str(type(value)), value))
    return [*values, None] if column.isna().any() else values


def _whole(value: Any) -> int:
    """Return a degree of parallelism; 0, which no profile has, for what is none."""
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0


def _type(value: Any) -> str:
    """Return the name of a type: ``torch.bfloat16`` is ``bfloat16``."""
    return "nan" if value is None else str(value).lower().rpartition(".")[2]


def _list(values: list[Any], *, short: bool = False) -> str:
    return some([str(value) if short else repr(value) for value in values])
