"""The options of commands, some of them shared, and the checks before the work begins."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from optsched.cli.output import tell
from optsched.costs.cost import CostModel
from optsched.costs.fleet import MAX_MACHINES, Fleet, fleet_of
from optsched.files.outputs import check_folder as check_folder, check_outputs as check_outputs
from optsched.files.read_write import read_instance
from optsched.files.sources import stated_cost_model
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.service import SLOS
from optsched.problem.specs import read_entries, read_pairs
from optsched.problem.text_files import parse_json
from optsched.workloads.problem import Problem


def in_range(
    low: float, *, strict: bool = False, infinite: bool = False
) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """Return an option's callback that checks that its number is >=, or >, a limit, and finite."""

    def check(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
        finite = value is None or math.isfinite(value) or (infinite and value == math.inf)
        if not finite or (value is not None and (value < low or (strict and value == low))):
            limit = f"{'>' if strict else '>='} {low:g}"
            source = context.get_parameter_source(str(parameter.name))
            of_environment = source is not None and source.name == "ENVIRONMENT"
            name = str(parameter.envvar) if of_environment else max(parameter.opts, key=len)
            raise UsageError(f"{name}: found {value!r}; expected a number {limit}")

        return value

    return check


AT_LEAST_0, AT_LEAST_1 = {"callback": in_range(0.0)}, {"callback": in_range(1)}
ABOVE_0 = {"callback": in_range(0.0, strict=True)}
ARGUMENT = {"argument": True}
"""Makes an argument of a parameter that has a default."""
_LONG_TPOT_S = 20.0
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def _time(parameter: typer.CallbackParam, text: str | None) -> float | None:
    """Return a time that may have a unit, as in ``50ms``; it must be > 0."""
    if text is None:
        return None

    name = max(parameter.opts, key=len)
    number, unit = re.fullmatch(r"(.*?)\s*([a-z]*)", str(text).strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        value = float(number) * _TIME_UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan

    if not 0 < value < math.inf:
        raise UsageError(f"{name}: found {text!r}; expected a time > 0, such as 0.05, 50ms or 1s")
    if "tpot" in name and value >= _LONG_TPOT_S:
        tell(f"warning: {name}: found {value:g} s for each token; 50ms is meant more often")

    return value


_TIME = {"callback": _time}
_FROM_ENVIRONMENT = {"envvar": "OPTSCHED_TIME_LIMIT"}
TimeLimit = Annotated[float, AT_LEAST_0, _FROM_ENVIRONMENT]
TimeLimitOrNone = Annotated[float | None, ABOVE_0, _FROM_ENVIRONMENT]
Seed = Annotated[int, {"min": 0}]
Given = Mapping[str, Any]
UNSET: Given = MappingProxyType({})
"""Of a parameter that stands for several options (`_GROUPS`), those that are given."""
RARE = "Rare options"
# The name of the second argument, which is the cost model.
_SECOND = "model_argument"

# Texts of parameters that several commands have, as `command` reads them.
_SHARED = """
  instance_file INSTANCE: A JSON file, or a shipped one's name: tiny, library/chat-x1.
  schedule_file SCHEDULE: The schedule: a JSON file.
  cost_model MODEL: A name or file; by default OPTSCHED_COST_MODEL.
  policies --policy SPEC: A policy (repeatable). By default all that the instance allows.
  workers N: Equal machines, each as the instance says.
  pools POOLS: 2p6d: 2 prefill and 6 decode machines; m: mixed.
  fleet FILE.toml: Machines that may differ.
  link LINK: What a move of KV takes: latency=50us,bandwidth=50GB/s.
  deflect_below N: Decode machines prefill shorter prompts than N.
  time_limit S: The time limit in seconds.
  seed N: The seed of all random choices.
  json_out --json FILE|-: Write the result as JSON; with - print only it.
  schedule_out FILE: Write the schedule.
  requests_out FILE: Write a row per request: .csv or .parquet.
  vllm KEY=VALUE: An argument of vllm.LLM (repeatable).
  gpu NAME: The GPU: a name (`optsched list gpus`), a .toml file, or KEY=VALUE,... of its peaks.
  tensor_parallel N: The number of GPUs that share every layer.
  slo_ttft S: The SLO on the time to first token, such as 1s.
  slo_tpot S: The SLO on the mean time per further token.
  slo_gap S: The SLO on the largest time between two tokens.
  slo_latency S: The SLO on the time from arrival to last token.
"""
# Shared parameters that are rare wherever they are.
_RARE = ("link", "deflect_below", "slo_gap", "slo_latency", "seed")
# Parameters that stand for several options, of which a command gets those that are given.
_GROUPS: dict[str, dict[str, Any]] = {
    "slos": dict.fromkeys(SLOS, Annotated[str | None, _TIME]),
    "machines": {
        "workers": str | None,
        "pools": str | None,
        "fleet": str | None,
        "link": str | None,
        "deflect_below": Annotated[int | None, {"min": 0}],
    },
}


class Command(TyperCommand):
    """A command whose help has the rare options below the others, and fits a screen."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, each panel of them as a section.

        What the usage says, and ranges, are left out.
        """
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], RARE: []}
        for one in self.get_params(ctx):
            panel = "Arguments" if one.param_type_name == "argument" else "Options"
            row = one.get_help_record(ctx)
            if row is not None:
                said = re.sub(r"  \[(required|x>=[\d.]+)\]|; x>=[\d.]+", "", row[1])
                title = getattr(one, "rich_help_panel", None) or panel
                sections[title].append((row[0].removesuffix(" <str>"), said))

        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


@functools.cache
def _shared() -> dict[str, tuple[list[str], str]]:
    return read_entries(_SHARED)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function as a command, whose options its signature and its docstring declare.

    Below a line ``Parameters:`` of the docstring, an entry is the name of a parameter, the names of
    its option if they are others, its metavar, a colon and its help. An entry ``Rare`` names
    parameters whose options are rare. A parameter without a default is an argument, or an option
    that must be given if it has names. Rules stand in its annotation. A ``typer.Context`` is passed
    on. Instead of ``slos`` the command has an option for each SLO, instead of ``machines`` those
    that describe a fleet, and gets those given as a dict. The cost model may be a second argument
    where the instance is the only one.
    """
    if function.__doc__ is None:
        raise SystemExit("error: python -OO: found no docstrings; expected them, for options")

    summary, _, own = inspect.cleandoc(function.__doc__).partition("\nParameters:\n")
    texts, hints = {**_shared(), **read_entries(own)}, get_type_hints(function, include_extras=True)
    rare = {*_RARE, *texts.pop("Rare", ([], ""))[1].rstrip(".").split(", ")}
    parameters: list[inspect.Parameter] = []

    def add(name: str, hint: Any, default: Any) -> None:
        more: dict[str, Any] = {"rich_help_panel": RARE} if name in rare else {}
        parameters.append(_parameter(name, hint, default, *texts[name], **more))

    for name, one in inspect.signature(function).parameters.items():
        if hints[name] is typer.Context:
            parameters.append(one.replace(annotation=typer.Context, kind=one.KEYWORD_ONLY))
        elif name in _GROUPS:
            for option, hint in _GROUPS[name].items():
                add(option, hint, None)
        else:
            add(name, hints[name], one.default)

    arguments = [one.name for one in parameters if isinstance(one.default, ArgumentInfo)]
    second = arguments == ["instance_file"] and "cost_model" in hints
    if second:
        words = ["MODEL"], "The cost model of seconds (`optsched list models`)."
        hint = Annotated[str | None, ARGUMENT]
        parameters.insert(1, _parameter(_SECOND, hint, None, *words))

    @functools.wraps(function)
    def run(**values: Any) -> None:
        for group in _GROUPS.keys() & hints.keys():
            given = {option: values.pop(option) for option in _GROUPS[group]}
            values[group] = {option: one for option, one in given.items() if one is not None}

        model = values.pop(_SECOND) if second else None
        if model is not None:
            if values["cost_model"] is not None:
                raise UsageError(f"--cost-model: found it beside MODEL {model!r}; expected one")

            values["cost_model"] = model

        function(**values)

    run.__doc__ = summary
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameter(
    name: str, hint: Any, default: Any, shown: list[str], words: str, **more: Any
) -> inspect.Parameter:
    """Return a parameter as typer reads it. `shown`: the names of its option, and its metavar."""
    names = [word for word in shown if word.startswith("-")]
    more["metavar"] = next((w for w in shown if w not in names), None)
    kind = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
    for rules in getattr(hint, "__metadata__", ()):
        more |= rules
    if kind is bool and not names:
        names = [f"--{name.replace('_', '-')}"]
    if default is inspect.Parameter.empty:
        default, more["show_default"] = ..., False

    argument = more.pop("argument", default is ... and not names)
    declare: Any = typer.Argument if argument else typer.Option
    declared = declare(default, *names, help=words, **more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=kind
    )


def check_suffix(path: str, option: str, *suffixes: str) -> None:
    """Raise UsageError unless a file's name has one of the suffixes."""
    if not path.endswith(suffixes):
        raise UsageError(
            f"{option}: found {path!r}; expected a name ending in {' or '.join(suffixes)}"
        )


def read_problem(
    instance_file: str,
    cost_model: str | None,
    *outputs: str | None,
    machines: Given = UNSET,
    slos: Given = UNSET,
    objective: str = TOTAL_LATENCY.name,
    folder: str | None = None,
    formulation: str | None = None,
) -> Problem:
    """Return the problem that a command's options say, and check that its outputs can be written.

    Errors in the instance are found first, then those in the outputs and in the cost model.
    """
    instance = read_instance(instance_file)
    check_outputs(*outputs)
    check_folder(folder)
    check_rounds(instance, formulation)
    fleet = fleet_from(stated_cost_model(instance, cost_model, instance_file), machines)
    return Problem(instance, fleet, objective, **slos)


def fleet_from(
    cost_model: CostModel | str | None, given: Given, stated: Fleet | None = None
) -> Fleet:
    """Return the machines that options describe, else those that a file states, else one.

    Of ``workers`` 1 is any number that a schedule has.
    """
    named = [name for name in ("workers", "pools", "fleet") if name in given]
    more = {name: given[name] for name in ("link", "deflect_below") if name in given}
    options = ", ".join(f"--{name.replace('_', '-')}" for name in (*named, *more))
    if more and not named:
        raise UsageError(f"{options}: found without --pools, --workers or --fleet; expected one")
    if len(named) > 1:
        raise UsageError(f"{options}: found together; expected one of --workers, --pools, --fleet")
    if not named:
        return stated or fleet_of(cost_model)

    text: str | int = given[named[0]]
    if named == ["workers"]:
        whole = str(text).removeprefix("-").isdecimal()
        text = check_whole(int(text) if whole else text, "--workers", 1, MAX_MACHINES)
    elif named == ["fleet"]:
        check_suffix(str(text), "--fleet", ".toml")

    return Fleet.of(text, cost_model, **more)


def check_requests_out(text: str | None) -> None:
    """Check the suffix of a file of requests, and that Parquet can be written if it is one."""
    if text is None:
        return

    check_suffix(text, "--requests-out", ".csv", ".parquet")
    if text.endswith(".parquet") and find_spec("pyarrow") is None:
        raise UsageError(
            f"--requests-out: {text!r} needs the package pyarrow; install it, or use .csv"
        )


def check_rounds(instance: Instance, formulation: str | None) -> None:
    """Raise UsageError if the formulation is ``hindsight`` and the instance is in seconds."""
    if formulation == "hindsight" and not instance.in_rounds:
        raise UsageError(
            "--formulation: found hindsight for an instance in seconds; expected an instance in "
            "rounds (`optsched import --rounds SECONDS` makes one from a trace)"
        )


def key_values(pairs: list[str] | None, option: str = "--set") -> dict[str, str]:
    """Return the ``key=value`` texts of an option that may be repeated as a dict."""
    return read_pairs(pairs or [], option, UsageError)


def engine_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Return arguments of an engine by name: each value as JSON if it is that, else as text."""
    found: dict[str, Any] = {}
    for key, text in key_values(pairs, "--vllm").items():
        try:
            found[key] = parse_json(text)
        except InputError:
            found[key] = text

    return found
