"""The options of commands, some of them shared, and the checks before the work begins."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from optsched.cli import beside
from optsched.cli.output import tell
from optsched.costs.cost import CostModel
from optsched.costs.fleet import MAX_MACHINES, Fleet, fleet_of
from optsched.files.outputs import check_folder, check_outputs
from optsched.files.read_write import read_instance
from optsched.files.sources import stated_cost_model
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.service import SLOS
from optsched.problem.specs import parameters_of, read_entries, read_pairs
from optsched.problem.text_files import parse_json
from optsched.workloads.problem import Problem


def in_range(
    low: float, *, strict: bool = False
) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """Return an option's callback that checks that its number is >=, or >, a limit, and finite."""

    def check(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return None

        is_above = value > low if strict else value >= low
        if math.isfinite(value) and is_above:
            return value

        # The error names what the user has set: the environment's variable, or the option by the
        # longest of its names.
        source = context.get_parameter_source(str(parameter.name))
        of_environment = source is not None and source.name == "ENVIRONMENT"
        name = str(parameter.envvar) if of_environment else max(parameter.opts, key=len)
        limit = f"{'>' if strict else '>='} {low:g}"
        raise UsageError(f"{name}: found {value!r}; expected a number {limit}")

    return check


AT_LEAST_0, AT_LEAST_1 = {"callback": in_range(0.0)}, {"callback": in_range(1)}
ABOVE_0 = {"callback": in_range(0.0, strict=True)}
ARGUMENT = {"argument": True}
"""Makes an argument of a parameter that has a default."""
# A TPOT from which on milliseconds are taken to be meant.
_LONG_TPOT_S = 20.0
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def _time(parameter: typer.CallbackParam, text: str | None) -> float | None:
    """Return a time that may have a unit, as in ``50ms``; it must be > 0."""
    if text is None:
        return None

    return time_of(max(parameter.opts, key=len), text)


def time_of(name: str, text: str) -> float:
    """Return the time of an option's text."""
    # The pattern matches any text. What is no number, or has another unit, becomes NaN, which the
    # check below refuses.
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
Seed = Annotated[int, {"min": 0}]
# The rules of parameters that commands take over from the functions that they run.
_RULES: dict[str, dict[str, Any]] = {
    "seed": {"min": 0},
    "time_limit": {**AT_LEAST_0, "envvar": "OPTSCHED_TIME_LIMIT"},
    "max_num_seqs": AT_LEAST_1,
    "max_num_batched_tokens": AT_LEAST_1,
}
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
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
# How the names of parameters end that say what to write: a FILE, or a DIR.
_OUTPUTS = ("out", "outs", "log")
# Shared parameters whose options may be repeated.
_LISTS = frozenset({"policies", "success"})
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
    """A command whose help has the rare options below the others, and fits a screen.

    Its options are made when they are asked for, since that may import what it runs.
    """

    def get_params(self, ctx: Any) -> Any:
        """Return the options, and make them if there are none yet."""
        # What `command` returns has a ``function``. The callback that takes its place has none, so
        # that options are made once.
        function = getattr(self.callback, "function", None)
        if function is not None:
            app = typer.Typer(add_completion=False)
            app.command()(_with_options(function))
            complete = typer.main.get_command(app)
            self.params, self.callback = complete.params, complete.callback

        return super().get_params(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, each panel of them as a section.

        What the usage says, and ranges, are left out.
        """
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], RARE: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue  # it is hidden

            names, text = record
            text = re.sub(r"  \[(required|x>=[\d.]+)\]|; x>=[\d.]+", "", text)
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            title = getattr(parameter, "rich_help_panel", None) or usual
            # An option of text without a metavar of its own needs no such word.
            sections[title].append((names.removesuffix(" <str>"), text))

        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


@functools.cache
def _shared() -> dict[str, tuple[list[str], str]]:
    """Return the names of options with their metavar, and their help, by parameter."""
    return read_entries(_SHARED)


def runs(target: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that says which function, ``module.name``, a command runs."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.runs = target  # type: ignore[attr-defined]
        return function

    return mark


def _target(function: Callable[..., None]) -> Callable[..., Any]:
    """Return the function that a command `runs`."""
    module, _, name = function.runs.rpartition(".")  # type: ignore[attr-defined]
    return getattr(import_module(module), name)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return what stands for a function as a `Command`, until its options are asked for."""
    if function.__doc__ is None:
        raise SystemExit("error: python -OO: found no docstrings; expected them, for options")

    def later() -> None: ...

    later.__doc__ = inspect.cleandoc(function.__doc__).partition("\nParameters:\n")[0]
    later.function = function  # type: ignore[attr-defined]
    return later


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function as typer reads it: its signature and its docstring declare options.

    Below a line ``Parameters:`` of the docstring, an entry is the name of a parameter, the names of
    its option if they are others, its metavar, a colon and its help. An entry ``Rare`` names
    parameters whose options are rare. A parameter without a default is an argument, or an option
    that must be given if it has names. Rules stand in its annotation. A ``typer.Context`` is passed
    on.

    A command with ``**options`` gets there what the function that it `runs` takes: every parameter
    of that function with an entry here is an option, too, with its type and its default.

    Instead of ``slos`` the command has an option for each SLO, instead of ``machines`` those
    that describe a fleet, and gets those given as a dict. Instead of ``problem`` it has both, the
    instance and the cost model, and the objective if that has an entry. The cost model may be a
    second argument where the instance is the only one. Files and folders to write, whose names end
    in ``out``, are checked before the work begins.
    """
    entries = read_entries(inspect.cleandoc(function.__doc__ or "").partition("\nParameters:\n")[2])
    texts = {**_shared(), **entries}
    _, rare_names = texts.pop("Rare", ([], ""))
    rare = {*_RARE, *rare_names.rstrip(".").split(", ")}
    known = inspect.signature(function).parameters
    groups = _GROUPS.keys() & known.keys()
    if "problem" in known:
        groups |= {"slos", "machines"}

    declared, passed = _declare(function, texts, with_objective="objective" in entries)
    for group in groups:
        declared |= {option: (hint, None) for option, hint in _GROUPS[group].items()}

    parameters = list[inspect.Parameter]()
    for name, (hint, default) in declared.items():
        if hint is typer.Context:
            parameters.append(inspect.Parameter(name, _BY_NAME, annotation=hint))
            continue

        panel: dict[str, Any] = {"rich_help_panel": RARE} if name in rare else {}
        parameters.append(_parameter(name, hint, default, *texts[name], **panel))

    arguments = [one.name for one in parameters if isinstance(one.default, ArgumentInfo)]
    if arguments == ["instance_file"] and "cost_model" in declared:
        words = ["MODEL"], "The cost model of seconds (`optsched list models`)."
        hint = Annotated[str | None, ARGUMENT]
        parameters.insert(1, _parameter(_SECOND, hint, None, *words))  # None: by default no model

    outputs = {name: texts[name][0] for name in declared if name.endswith(_OUTPUTS)}

    # What typer calls: it turns single options into groups, a problem and the target's parameters.
    @functools.wraps(function)
    def run(**values: Any) -> None:
        # The argument MODEL and the option --cost-model are one.
        model = values.pop(_SECOND, None)
        if model is not None:
            if values["cost_model"] is not None:
                raise UsageError(f"--cost-model: found it beside MODEL {model!r}; expected one")

            values["cost_model"] = model

        _check_outputs(outputs, values)
        for group in groups:
            of_group = {option: values.pop(option) for option in _GROUPS[group]}
            values[group] = {name: value for name, value in of_group.items() if value is not None}

        # The target calls some parameters by other names (`_declare`).
        for option, key in passed.items():
            values[key] = values.pop(option)
        for option in _LISTS & values.keys():
            values[option] = values[option] or None  # an empty list is an option that is not given
        if "problem" in known:
            _put_problem(values, keep=known)
            beside.note(function.__name__, values)

        function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _declare(
    function: Callable[..., None], texts: Mapping[str, Any], *, with_objective: bool
) -> tuple[dict[str, tuple[Any, Any]], dict[str, str]]:
    """Return the options of a command, but for groups, and what of them the target takes.

    The first is hint and default by option, in the order of the help; the second is the target's
    parameter by option. They differ where ``time_limit_s`` is the option ``--time-limit``. `texts`:
    the entries of the help, by option; a parameter without one is no option. `with_objective`:
    whether a command with a problem has the option of its objective.
    """
    known = inspect.signature(function).parameters
    hints = get_type_hints(function, include_extras=True)
    declared, passed = dict[str, tuple[Any, Any]](), dict[str, str]()
    for name, parameter in known.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            # The target is the function that the command `runs`, which gets its ``**options``.
            for key, parameter_info in parameters_of(_target(function)).items():
                # Options do not say the unit: ``time_limit_s`` is ``time_limit`` here.
                option = key if key in texts else key.removesuffix("_s")
                if option not in texts or option in {*known, *declared}:
                    continue  # the command has no entry for it, or declares it itself

                passed[option] = key
                kind: Any = list[str] if option in _LISTS else parameter_info.type
                kind = kind | None if parameter_info.optional else kind
                declared[option] = Annotated[kind, _RULES.get(option, {})], parameter_info.default
        elif name == "problem":
            declared |= {"instance_file": (str, parameter.empty), "cost_model": (str | None, None)}
            if with_objective:
                declared["objective"] = str, TOTAL_LATENCY.name
        elif name not in _GROUPS:
            declared[name] = hints[name], parameter.default

    return declared, passed


def _check_outputs(texts: Mapping[str, Sequence[str]], values: Given) -> None:
    """Check that the files and folders that options name can be written.

    `texts`: by option, its names and its metavar, which says whether it is a FILE or a DIR.
    """
    files: list[str | None] = []
    for name, words in texts.items():
        if "DIR" in words:
            check_folder(values[name])
        elif any("FILE" in word for word in words):
            files += values[name] if isinstance(values[name], list) else [values[name]]

    check_outputs(*files)


def _put_problem(values: dict[str, Any], keep: Collection[str]) -> None:
    """Put the problem in place of its options; of the groups those that a command keeps stay.

    `values`: those of the command's parameters, which are changed. `keep`: its parameters.
    """
    machines = {**values.pop("machines")}
    slos = {**values.pop("slos")}
    if "machines" in keep:  # the command itself knows what `auto` means
        values["machines"] = machines
        machines = {name: text for name, text in machines.items() if text != "auto"}

    values["problem"] = read_problem(
        values.pop("instance_file"),
        values.pop("cost_model"),
        machines=machines,
        slos=slos,
        objective=values.pop("objective", TOTAL_LATENCY.name),
        formulation=values.get("formulation"),
    )


def _parameter(
    name: str, hint: Any, default: Any, shown: list[str], words: str, **more: Any
) -> inspect.Parameter:
    """Return a parameter as typer reads it.

    `hint`: its type, maybe annotated with rules. `shown`: the names of its option, and its metavar.
    `words`: its help. `more`: further arguments of `typer.Option`.
    """
    names = [word for word in shown if word.startswith("-")]
    more["metavar"] = next((word for word in shown if word not in names), None)
    kind = hint
    if hasattr(hint, "__metadata__"):
        kind = hint.__origin__
        for rules in hint.__metadata__:
            more |= rules

    if kind is bool and not names:
        names = [f"--{name.replace('_', '-')}"]  # without a name, typer would add one with --no-
    if default is inspect.Parameter.empty:
        default, more["show_default"] = ..., False  # typer's mark of what must be given

    # A rule may say that it is an argument (`ARGUMENT`). Else one without default and names is.
    is_argument = more.pop("argument", default is ... and not names)
    declare: Any = typer.Argument if is_argument else typer.Option
    info = declare(default, *names, help=words, **more)
    return inspect.Parameter(name, _BY_NAME, default=info, annotation=kind)


def check_suffix(path: str, option: str, *suffixes: str) -> None:
    """Raise UsageError unless a file's name has one of the suffixes."""
    if not path.endswith(suffixes):
        raise UsageError(
            f"{option}: found {path!r}; expected a name ending in {' or '.join(suffixes)}"
        )


def read_problem(
    instance_file: str,
    cost_model: str | None,
    machines: Given = UNSET,
    slos: Given = UNSET,
    objective: str = TOTAL_LATENCY.name,
    formulation: str | None = None,
) -> Problem:
    """Return the problem that a command's options say; errors in the instance are found first."""
    instance = read_instance(instance_file)
    check_rounds(instance, formulation)
    fleet = fleet_from(stated_cost_model(instance, cost_model, instance_file), machines)
    return Problem(instance, fleet, objective, **slos)


def fleet_from(
    cost_model: CostModel | str | None, given: Given, stated: Fleet | None = None
) -> Fleet:
    """Return the machines that options describe, else those that a file states, else one.

    Where a single machine is described, a schedule may have any number of such workers.
    """
    named = [name for name in ("workers", "pools", "fleet") if name in given]
    details = {name: given[name] for name in ("link", "deflect_below") if name in given}
    options = ", ".join(f"--{name.replace('_', '-')}" for name in (*named, *details))
    if details and not named:
        raise UsageError(f"{options}: found without --pools, --workers or --fleet; expected one")
    if len(named) > 1:
        raise UsageError(f"{options}: found together; expected one of --workers, --pools, --fleet")
    if not named:
        return stated or fleet_of(cost_model)

    text: str | int = given[named[0]]
    if named == ["workers"]:
        # A text that is no whole number is passed on, and `check_whole` says what is wrong with it.
        is_whole = str(text).removeprefix("-").isdecimal()
        text = check_whole(int(text) if is_whole else text, "--workers", 1, MAX_MACHINES)
    elif named == ["fleet"]:
        check_suffix(str(text), "--fleet", ".toml")

    return Fleet.of(text, cost_model, **details)


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
    settings: dict[str, Any] = {}
    for key, text in key_values(pairs, "--vllm").items():
        try:
            settings[key] = parse_json(text)
        except InputError:
            settings[key] = text  # a name, which nobody puts into quotes

    return settings
