"""What the rows of a profile are: device, model, parallelism, types, window, kind of layer.

Every source's rows pass through `Claim.select`. Columns that identify are known by name, wherever
they stand. Their values have to agree with what was asked for, and say what was not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.costs.architectures import Architecture, architecture, same_architecture
from optsched.costs.devices import DEVICES, Device, device, devices_named
from optsched.costs.profiles.tables import PARTS, Profile, Rejected, Table
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    Frame = pd.DataFrame

DEFAULT_DEVICE = "a100-80gb"
_NAMES = {
    "device": r"(device|gpu|hardware|accelerator|sku)(_(name|type|model|sku))?",
    "model": r"(hf_)?model(_(id|name|path))?",
    "degree": r"tp(_(size|degree))?|(num_)?tensor_(model_)?parallel(ism)?(_(size|degree|workers))?",
    "window": r".*window(_(size|left|right|tokens))?|swa(_.*)?",
    "type": r".*dtype|(.*_)?quant(iz.*|_.*)?|(kv_cache|weight)_type|.*precision|variant",
    "experts": r".*(moe|experts?)(_.*)?|(router_)?top_?k",
    "one": r"beam_width|pp(_size)?|.*pipeline.*",
    "unit": r"((time|latency)_)?units?",
    "constant": r"framework|engine|.*backend|.*version",
}
"""What each column that identifies tells, by its name. Of the constant ones a profile has one
value, whatever it is, since the rows of two engines are two profiles."""
_NO = frozenset({"0", "0.0", "-1", "-1.0", "false", "no", "none", "off", "full", "dense"})
_PLAIN = {
    "window": (_NO, "0, since attention is over all tokens"),
    "experts": (_NO | {"1", "1.0"}, "dense layers, without experts"),
    "one": (_NO | {"1", "1.0"}, "1"),
}
_MILLI, _MICRO = ("ms", "msec", "milliseconds"), ("us", "usec", "microseconds")
_NAMELESS = re.compile(r"(cuda|gpu|hip|xpu)?:?\d*(\.0)?")
"""Values of a device's column that name none: the kind, or the number of one in its machine."""
SIXTEEN = (
    ("bfloat16", "bf16", "auto", "none", "nan", "false", "no", "unquantized"),
    ("float16", "fp16", "half"),
)
"""Names of 16-bit types. Rows of the second are used where there are none of the first."""
_OTHER = re.compile("fp8|fp4|e4m3|e5m2|int8|int4|awq|gptq|w4|w8|[48]bit|fp32|float32")
FEW = 12
"""Maximum number of different values of an unknown column that may identify."""


@dataclass(frozen=True)
class Rule:
    """Which values of a column are those that are wanted, and what errors call them."""

    fits: Callable[[Any], bool]
    expected: str


@dataclass
class Claim:
    """What a profile is asked to be, and what its files say that it is.

    None stands for what was not asked for, until a file tells it. ``asked`` is a device's name that
    may mean several, and ``only`` has the values of columns without which no row is wanted.
    """

    model: str | None = None
    degree: int | None = None
    device: Device | None = None
    asked: str = ""
    link_gb_s: float | None = None
    only: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    same: dict[str, str] = field(default_factory=dict)

    def select(
        self,
        file: Path,
        rows: Frame,
        *,
        exact: Mapping[str, Any] | None = None,
        known: Iterable[str] = (),
        many: bool = True,
    ) -> Frame:
        """Return the rows of a file that are what was asked for, or raise InputError if none is.

        ``exact`` has values that columns must have if the file has them: the operator, and sizes
        of the model. ``known`` are further columns that the reader understands. With ``many`` the
        rows are counted in a note.
        """
        total, left = len(rows), []
        micro = any(str(column).endswith("_us") for column in rows)
        # What is chosen by hand comes first: it may leave a single engine or device. It does not
        # make rows of another kind right, so all rules follow.
        chosen = [name for name in self.only if name in rows]
        self.met.update(chosen)

        for name, by_hand in [*((n, True) for n in chosen), *((n, False) for n in rows.columns)]:
            values = _values(rows, name)
            rule = _chosen(self.only[name]) if by_hand else None
            if rule is None and values:
                rule = self._rule(file, name, values, exact or {}, micro)
            if rule is None:
                continue

            fits = {value for value in values if rule.fits(value)}
            if not fits:
                raise InputError(f"{file}: {name}: found {_list(values)}; expected {rule.expected}")

            keep = rows[name].isin(fits - {None})
            if None in fits:
                keep |= rows[name].isna()
            if not keep.all():
                others = _list([value for value in values if value not in fits], short=True)
                left.append(f"{int((~keep).sum())} with {name} {others}")
                rows = rows[keep]

        if many:
            words = "; left out are " + ", ".join(left) if left else ""
            self.notes.append(f"{file.name}: {len(rows)} of {total} rows are used{words}")
            self._report_unknown(file, rows, {*known, *(exact or {}), "line"})

        return rows

    def check(self, file: Path, facts: Mapping[str, Any]) -> None:
        """Check what a file says of the whole profile, as `select` does for rows."""
        import pandas as pd

        self.select(file, pd.DataFrame([dict(facts)]), many=False)

    def shape(self, place: Path) -> Architecture:
        """Return the model's architecture. Errors begin with the place of the profile."""
        try:
            return architecture(self.model or "")
        except InputError as error:
            raise InputError(f"{place}: {error} (--model)") from None

    def peak(self, folder: Path) -> Device:
        """Return the device that was profiled, as asked for, or as the files or folders name it.

        Public profiles are sorted into folders by device.
        """
        whole = folder.resolve()
        for part in [whole, *whole.parents][:5]:
            named = devices_named(part.name)
            if not named or self.device in named or self.asked:
                continue
            if self.device is not None:
                if "device" not in self.met:
                    self.notes.append(f"the folder {part.name} names another device")

                break

            usual = [one for one in named if one.name == DEFAULT_DEVICE]
            self.device = usual[0] if usual else device(part.name)
            self.notes.append(f"the device is {self.device.name}, as the folder {part.name} says")

        if self.device is None and self.asked:
            self.device = device(self.asked)
        if self.device is None:
            self.device = DEVICES[DEFAULT_DEVICE]
            self.notes.append(f"no file names the device, which is taken to be {DEFAULT_DEVICE}")

        if self.link_gb_s is not None:
            self.device = replace(self.device, link_gb_s=self.link_gb_s)

        return self.device

    def profile(
        self,
        source: str,
        shape: Architecture,
        tables: Sequence[Table],
        files: str | Mapping[str, str],
        rejected: Sequence[Rejected] = (),
        **grids: Any,
    ) -> Profile:
        """Return the profile, once `peak` is known. ``files`` may be one place of all parts."""
        assert self.device is not None
        return Profile(
            source, shape, self.degree or 1, self.device, tuple(tables), tuple(rejected),
            tuple(self.notes),
            files=dict.fromkeys(PARTS, files) if isinstance(files, str) else files, **grids,
        )  # fmt: skip

    def check_only(self, folder: Path) -> None:
        """Raise InputError if a column of ``only`` was in no file."""
        for name in self.only:
            if name not in self.met:
                raise InputError(
                    f"{folder}: only: found no column {name!r}; expected one of its files"
                )

    def _rule(
        self, file: Path, name: str, values: list[Any], exact: Mapping[str, Any], micro: bool
    ) -> Rule | None:
        """Return what a column's values have to be, or None if it does not identify."""
        kind = kind_of(name)
        if name in exact:
            wanted = exact[name]
            whose = "" if isinstance(wanted, str) else f" ({self.model}, degree {self.degree or 1})"
            return Rule(lambda v: v == wanted or str(v) == str(wanted), f"{wanted!r}{whose}")

        if kind == "device":
            named = [one for one in values if not _NAMELESS.fullmatch(str(one).lower())]
            return self._device(file, name, named) if named else None

        if kind == "model":
            return self._model(file, name, values)
        if kind == "degree":
            return self._degree(file, name, values)
        if kind == "type":
            texts = {_type(value) for value in values}
            if name == "variant" and not any(map(_OTHER.search, texts)):
                return None  # it may be any word

            kinds = next((kind for kind in SIXTEEN if texts & set(kind)), SIXTEEN[0])
            return Rule(
                lambda value: _type(value) in kinds, f"{kinds[0]}, since no other is priced"
            )

        if kind == "unit":
            units = _MICRO if micro else _MILLI
            return Rule(lambda value: str(value).lower() in units, f"{units[0]}, as its times are")

        if kind in _PLAIN:
            fitting, expected = _PLAIN[kind]
            return Rule(lambda value: str(value).lower() in fitting, expected)

        if kind == "constant":
            self._constant(file, name, values)

        return None

    def _device(self, file: Path, name: str, values: list[Any]) -> Rule:
        self.met.add("device")
        if self.device is None:
            self.device = _one_device(file, name, values, self.asked)
            words = f"{file.name}: {name}: found {_list(values)}; the device is {self.device.name}"
            self.notes.append(words)

        asked = self.device

        def fits(value: Any) -> bool:
            named = devices_named(str(value))
            if asked.name in DEVICES and asked.name != "cpu":
                return asked.name in {one.name for one in named}

            # A device of one's own may be called anything, and a processor, too.
            return str(value) == asked.name or (asked.name != "cpu" or not named)

        return Rule(fits, f"{asked.name!r}, or another --device")

    def _model(self, file: Path, name: str, values: list[Any]) -> Rule:
        if self.model is None:
            if len(values) > 1:
                raise InputError(
                    f"{file}: {name}: found {_list(values)}; expected --model with one of them"
                )

            self.model = str(values[0])

        asked = self.model
        # What a configuration of one's own describes may be called anything that is not known.
        own = Path(asked).suffix == ".json" or (Path(asked) / "config.json").is_file()

        def fits(value: Any) -> bool:
            return same_architecture(str(value), asked) or (own and not _is_known(str(value)))

        return Rule(fits, f"{asked!r}, or another --model")

    def _degree(self, file: Path, name: str, values: list[Any]) -> Rule:
        degrees = sorted({_whole(value) for value in values} - {0}) or [1]
        if self.degree is None:
            if len(degrees) > 1 and 1 not in degrees:
                raise InputError(
                    f"{file}: {name}: found {_list(degrees)}; expected --tensor-parallel with one "
                    "of them"
                )

            self.degree = 1 if 1 in degrees else degrees[0]

        asked = self.degree
        return Rule(lambda value: _whole(value) == asked, f"{asked}, or another --tensor-parallel")

    def _constant(self, file: Path, name: str, values: list[Any]) -> None:
        if len(values) > 1:
            raise InputError(
                f"{file}: {name}: found {_list(values)}; expected one of them, as in --only "
                f"{name}={values[0]}"
            )

        found = str(values[0])
        if name not in self.same:
            self.same[name] = found
            self.notes.append(f"{name} {found}")
        elif self.same[name] != found:
            self.notes.append(f"{file.name}: {name} {found}, and not {self.same[name]}")

    def _report_unknown(self, file: Path, rows: Frame, known: set[str]) -> None:
        """Note the columns of few values that no rule is for: they may tell kinds of rows apart."""
        for name in rows.columns:
            if name in known or kind_of(name) or rows[name].dtype.kind == "f":
                continue

            values = _values(rows, name)
            if 1 < len(values) <= FEW:
                self.notes.append(
                    f"{file.name}: {name} is {_list(values, short=True)}, and rows of all of them "
                    f"are used (--only {name}=VALUE takes one)"
                )


def kind_of(column: Any) -> str | None:
    """Return what a column tells if it identifies: a key of `_NAMES`, however it is written."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(column)).lower()
    plain = re.sub(r"[^a-z0-9]+", "_", words).strip("_")
    return next((kind for kind, names in _NAMES.items() if re.fullmatch(names, plain)), None)


def _chosen(text: str) -> Rule:
    return Rule(lambda value: str(value) == text, f"{text!r}, as asked for")


def _one_device(file: Path, name: str, values: list[Any], asked: str) -> Device:
    """Return the device that a column names; of several, the default if it is among them.

    If one is asked for by a name of several, it is one of these.
    """
    named = [devices_named(str(value)) for value in values]
    if asked:
        met = {one.name: one for one in devices_named(asked) for many in named if one in many}
        if not met:
            raise InputError(f"{file}: {name}: found {_list(values)}; expected {asked!r}")

        return next(iter(met.values())) if len(met) == 1 else device(asked)

    found = {
        many[0].name if many else str(value) for many, value in zip(named, values, strict=True)
    }
    if len(values) > 1 and DEFAULT_DEVICE in found:
        return DEVICES[DEFAULT_DEVICE]
    if len(found) > 1:
        raise InputError(
            f"{file}: {name}: found {_list(values)}; expected --device with one of them"
        )

    try:
        return device(str(values[0]))
    except InputError as error:
        reason = str(error).removeprefix("device: ")
        raise InputError(f"{file}: {name}: {reason} (--device)") from None


def _values(rows: Frame, name: str) -> list[Any]:
    """Return the different values of a column; none if it has no value at all, or lists."""
    column = rows[name]
    if column.isna().all() or column.map(lambda value: isinstance(value, (list, dict))).any():
        return []

    found = sorted(column.dropna().unique().tolist(), key=lambda value: (str(type(value)), value))
    return [*found, None] if column.isna().any() else found


def _whole(value: Any) -> int:
    """Return a degree of parallelism; 0, which no profile has, for what is none."""
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0


def _is_known(name: str) -> bool:
    try:
        architecture(name)
    except InputError:
        return False

    return True


def _type(value: Any) -> str:
    return "nan" if value is None else str(value).lower().rpartition(".")[2]


def _list(values: list[Any], *, short: bool = False) -> str:
    texts = [str(value) if short else repr(value) for value in values]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")
