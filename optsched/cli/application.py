"""The application: its commands, its global options, and the way errors end the process."""

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import optsched
from optsched.cli import (
    beside,
    capacity,
    comparing,
    demo,
    diagnosing,
    experimenting,
    files,
    fitting,
    judging,
    library,
    listing,
    picturing,
    profiling,
    replaying,
    solving,
    splitting,
)
from optsched.cli.options import Command, command
from optsched.cli.output import only_json, only_tables, tell
from optsched.problem.budget import work_time
from optsched.problem.errors import OptschedError, UsageError, in_words
from optsched.problem.kernel import UNKEPT
from optsched.problem.notes import warn
from optsched.problem.registry import Registry

_COMPLETION = ["--install-completion"], ["--show-completion"]  # typer ends the process itself
# Options of every command for its tables, and how names of files for them may end.
_TABLE_OPTIONS, _TABLE_SUFFIXES = ("--csv", "--latex"), (".csv", ".tex")
# Commands of other packages.
_PLUGGED: Registry[Callable[..., None]] = Registry("command", plugins="optsched.commands")


class Commands(TyperGroup):
    """A group that runs a command, and turns every failure into one line and an exit status.

    Commands of other packages stand below those of this one.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of commands, in the order of the help."""
        return [*self.commands, *sorted(_PLUGGED.all().keys() - self.commands.keys())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name; others' packages are only looked into for unknown ones."""
        if cmd_name not in self.commands and cmd_name in _PLUGGED.all():
            try:
                group = _register(typer.Typer(), {cmd_name: _PLUGGED.get(cmd_name)})
                plugged = typer.main.get_group(group).commands[cmd_name]
                plugged.get_params(ctx)  # which fails here if its options cannot be made
                return plugged
            except (Exception, SystemExit) as error:
                warn(f"optsched.commands: {cmd_name!r} is left out: {in_words(error)}")

        return self.commands.get(cmd_name)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and exit with the status that `options` describes."""
        # These options may stand anywhere, so they are taken out before a command sees its own.
        words = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in words
        table_form = next((option[2:] for option in _TABLE_OPTIONS if option in words), None)
        table_files = [
            word
            for option, word in pairwise(words)
            if option in _TABLE_OPTIONS and word.endswith(_TABLE_SUFFIXES)
        ]
        words = [word for word in words if word not in ("--debug", *_TABLE_OPTIONS)]
        is_completion = words[:1] in _COMPLETION  # asked now, since the parser takes words away
        handler = signal.getsignal(signal.SIGINT)
        self._main_shell_completion(extra, "optsched", complete_var)

        try:
            _at_ctrl_c(signal.default_int_handler)
            if table_files:
                raise UsageError(
                    f"--{table_form}: found the file {table_files[0]!r}; expected none: the table "
                    f"is printed, and `> {table_files[0]}` writes it there"
                )

            # The parser's own `main` would end a closed pipe and Ctrl-C in its own way.
            with (
                only_tables(table_form) if table_form else nullcontext(),
                only_json() if _prints_only_json(words) else nullcontext(),
                self.make_context("optsched", words, **extra) as context,
            ):
                self.invoke(context)

            sys.stdout.flush()
        except typer.Exit as stop:
            sys.exit(stop.exit_code)
        except BrokenPipeError:
            # The reader has closed the pipe. Without this, Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(0)
        except (KeyboardInterrupt, typer.Abort):
            _at_ctrl_c(signal.SIG_IGN)
            _fail("interrupted", 130, debug)
        except OptschedError as error:
            _fail(str(error), error.exit_code, debug)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}{error.strerror or error}", 2, debug)
        except BaseException as error:  # a user's policy may even raise SystemExit
            if isinstance(error, SystemExit) and is_completion:
                raise

            if hasattr(error, "format_message"):  # a usage error of the command-line parser
                message = error.format_message().rstrip(".")
                parsed = getattr(error, "ctx", None)
                if parsed is not None:
                    message += f"; `{parsed.command_path} --help` says what is expected"

                _fail(message, int(getattr(error, "exit_code", 2)), debug)

            hint = "" if debug else " (--debug for the traceback)"
            _fail(f"internal error: {type(error).__name__}: {error}{hint}", 1, debug, prefix="")
        finally:
            _at_ctrl_c(handler or signal.SIG_DFL)

        sys.exit(0)


def _at_ctrl_c(handler: Any) -> None:
    """Set what Ctrl-C does, where that is possible."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _prints_only_json(words: Sequence[str]) -> bool:
    """Return whether standard output is only for the JSON of ``--json -``."""
    if "--help" in words or "-h" in words:
        return False

    return "--json=-" in words or ("--json", "-") in pairwise(words)


def _warn_once() -> None:
    """Make every warning print in one line, and only once, also if Python makes it an error.

    A library's warning is no failure of a command.
    """
    # The first field of a filter is what it does.
    warnings.filters[:] = [entry for entry in warnings.filters if entry[0] != "error"]  # type: ignore[index]
    os.environ.pop("PYTHONWARNINGS", None)  # which processes of its own would heed
    shown: set[str] = set()

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in shown:
            shown.add(text)
            print(f"warning: {text}", file=sys.stderr)  # `notes.warn` has logged it

    warnings.showwarning = show


def _fail(message: str, status: int, debug: bool, *, prefix: str = "error: ") -> NoReturn:
    """Print an error on one line, and end the process."""
    if debug:
        traceback.print_exc()

    tell(prefix + " ".join(message.split()))
    sys.exit(status)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _eager(name: str, work: Callable[[], None], words: str) -> Any:
    """Return an option that does its work at once, in place of a command."""

    def work_and_exit(wanted: bool) -> None:
        if wanted:
            work()
            raise typer.Exit

    return typer.Option(name, help=words, callback=work_and_exit, is_eager=True)


def _version() -> None:
    print(f"optsched {optsched.__version__}")


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, _eager("--version", _version, "Print the version.")] = False,
    warmup: Annotated[
        bool, _eager("--warmup", listing.warmup, "Compile all loops now, to wait for none later.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback for errors.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print only tables, as CSV.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print only tables, as LaTeX.")] = False,
) -> None:
    """Compute how good an LLM-serving schedule could have been, with a proof.

    Exit status: 0 an answer, 2 bad usage or input, 3 infeasible, 4 nothing found, 5 not verified,
    130 interrupted, 1 an internal error.
    """
    if context.invoked_subcommand is None:
        print(_FIRST)


# The text that ``optsched`` without a command prints for newcomers.
_FIRST = """\
optsched computes how good an LLM-serving schedule could have been, with a proof. First steps:

  optsched demo                                        # all of it in a minute, with a report
  optsched compare tiny --policy mc-sf --policy fcfs   # schedulers beside the best schedule
  optsched import azure TRACE.csv -o mine.json         # a trace of yours, to compare and solve
  optsched --help                                      # every command"""


_GPU_HELP = "Cost models of a GPU, and measurements on a real one."
_LIBRARY_HELP = """Hold schedules and certificates against the library.

`optsched list library [NAME]` shows the library, `optsched verify library[/NAME]` verifies it.
"""
_ANYWHERE = "--csv, --latex (only tables) and --debug (tracebacks) may stand anywhere."
# In the order of `optsched --help`.
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "compare": comparing.compare,
    "solve": solving.solve,
    "bound": solving.bound,
    "simulate": judging.simulate,
    "evaluate": judging.evaluate,
    "verify": judging.verify,
    "why": judging.why,
    "capacity": capacity.capacity,
    "splits": splitting.splits,
    "diagnose": diagnosing.diagnose,
    "generate": files.generate,
    "import": files.import_trace,
    "export": files.export,
    "plot": picturing.plot,
    "report": picturing.report,
    "ratios": experimenting.ratios,
    "experiment": experimenting.experiment,
    "score": library.score,
    "list": listing.list_kind,
}
_ON_GPUS: dict[str, Callable[..., None]] = {
    "fit": fitting.fit,
    "roofline": fitting.roofline,
    "profile": profiling.profile,
    "replay": replaying.replay,
}
# Other names, which scripts use, of what stands above.
_ALIASES: dict[str, Callable[..., None]] = {
    "fit": fitting.fit,
    "roofline": fitting.roofline,
    "policies": listing.policies,
    "models": listing.models,
    "schema": listing.schema,
}
# For who adds to the library: `check` is the only one that has no other name.
_OF_LIBRARY: dict[str, Callable[..., None]] = {
    "check": library.check,
    "list": library.list_library,
    "show": library.show,
    "verify": library.verify,
}


def _register(
    group: typer.Typer, functions: dict[str, Callable[..., None]], **more: Any
) -> typer.Typer:
    """Make commands of functions in a group, and return the group."""
    for name, function in functions.items():
        group.command(name, cls=Command, epilog=_ANYWHERE, **more)(command(function))

    return group


_register(app, COMMANDS)
app.add_typer(_register(typer.Typer(help=_GPU_HELP), _ON_GPUS), name="gpu")
app.add_typer(_register(typer.Typer(help=_LIBRARY_HELP), _OF_LIBRARY), name="library", hidden=True)
_register(app, _ALIASES, hidden=True)


def _at_first_loop() -> None:
    """Say that a command compiles, and let others compile with it."""
    tell("note: compiling loops; time limits count without it")
    beside.begin()


def main() -> None:
    """Run the command line."""
    _warn_once()
    work_time.tell = _at_first_loop
    try:
        app()
    finally:
        beside.end()
        if work_time.stood_s >= 1:
            words = f"note: compiling loops took {work_time.stood_s:.0f} s"
            if not UNKEPT:  # what is compiled stays on the disk
                words += (
                    ", which no later run needs; `optsched --warmup` compiles all that commands use"
                )
            tell(words)
