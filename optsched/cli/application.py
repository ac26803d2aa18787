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
    capacity,
    comparing,
    data,
    demo,
    diagnosing,
    experimenting,
    files,
    fitting,
    judging,
    library,
    listing,
    picturing,
    predicting,
    profiling,
    replaying,
    solving,
    splitting,
)
from optsched.cli.options import command
from optsched.cli.output import only_json, only_tables, tell
from optsched.problem.budget import work_time
from optsched.problem.errors import OptschedError, UsageError
from optsched.problem.kernel import UNKEPT

_FORMS, _TABLES = ("--csv", "--latex"), (".csv", ".tex")


class Commands(TyperGroup):
    """A group that runs a command, and turns every failure into one line and an exit status."""

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
        words = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in words
        form = next((one[2:] for one in _FORMS if one in words), None)
        after = next((b for a, b in pairwise(words) if a in _FORMS and b.endswith(_TABLES)), None)
        words = [word for word in words if word not in ("--debug", *_FORMS)]
        before = signal.getsignal(signal.SIGINT)

        try:
            _at_ctrl_c(signal.default_int_handler)
            if after is not None:
                raise UsageError(
                    f"--{form}: found the file {after!r}; expected none: the table is printed, and "
                    f"`> {after}` writes it there"
                )

            # The parser's own `main` would end a closed pipe and Ctrl-C in its own way.
            with (
                only_tables(form) if form else nullcontext(),
                only_json() if _json_alone(words) else nullcontext(),
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
            if hasattr(error, "format_message"):  # a usage error of the command-line parser
                message = error.format_message().rstrip(".")
                of = getattr(error, "ctx", None)
                if of is not None:
                    message += f"; `{of.command_path} --help` says what is expected"

                _fail(message, int(getattr(error, "exit_code", 2)), debug)

            hint = "" if debug else " (--debug for the traceback)"
            _fail(f"internal error: {type(error).__name__}: {error}{hint}", 1, debug, prefix="")
        finally:
            _at_ctrl_c(before or signal.SIG_DFL)

        sys.exit(0)


def _at_ctrl_c(handler: Any) -> None:
    """Set what Ctrl-C does, where that is possible."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _json_alone(words: Sequence[str]) -> bool:
    """Return whether standard output is only for the JSON of ``--json -``."""
    if "--help" in words or "-h" in words:
        return False

    return "--json=-" in words or ("--json", "-") in pairwise(words)


def _warn_once() -> None:
    """Make every warning print in one line, and only once, also if Python makes it an error.

    A library's warning is no failure of a command.
    """
    warnings.filters[:] = [one for one in warnings.filters if one[0] != "error"]  # type: ignore[index]
    os.environ.pop("PYTHONWARNINGS", None)  # which processes of its own would heed
    seen: set[str] = set()

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in seen:
            seen.add(text)
            tell(f"warning: {text}")

    warnings.showwarning = show


def _fail(message: str, status: int, debug: bool, *, prefix: str = "error: ") -> NoReturn:
    if debug:
        traceback.print_exc()

    tell(prefix + " ".join(message.split()))
    sys.exit(status)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"optsched {optsched.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback for errors. It may stand anywhere.")
    ] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print only tables, as CSV. It may stand anywhere.")
    ] = False,
    latex: Annotated[bool, typer.Option("--latex", help="The same as LaTeX.")] = False,
) -> None:
    """Compute how good an LLM-serving schedule could have been, with a proof.

    The exit status is 0 for an answer, 2 for bad usage or input, 3 if there is no schedule, 4 if
    none was found within the limits, 5 for a schedule or certificate that does not verify, 130 for
    an interrupted experiment or download, and 1 for an internal error.
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


_ANYWHERE = "Anywhere in any command: --csv or --latex print only tables, --debug shows tracebacks."
COMMANDS: tuple[Callable[..., None], ...] = (
    *(solving.solve, capacity.capacity, comparing.compare, solving.bound),
    *(splitting.splits, diagnosing.diagnose, demo.demo),
    *(judging.simulate, judging.evaluate, judging.why, judging.hits, judging.verify),
    *(predicting.predict, files.generate, files.import_trace, files.export, fitting.fit),
    *(fitting.roofline, fitting.kv_capacity, profiling.profile, replaying.replay),
    *(
        experimenting.experiment,
        experimenting.ratios,
        picturing.plot,
        picturing.trace,
        picturing.report,
    ),
    *(listing.policies, listing.formulations, listing.methods, listing.models),
    *(listing.schema, library.score, listing.warmup),
)
for function in COMMANDS:
    special: dict[str, Any] = {"epilog": _ANYWHERE}
    if function in (files.import_trace, files.generate):
        special |= {"cls": files.RegistryCommand, "name": function.__name__.removesuffix("_trace")}

    app.command(**special)(command(function))

app.add_typer(data.app, name="data")
app.add_typer(library.app, name="library")


def main() -> None:
    """Run the command line."""
    _warn_once()
    work_time.tell = lambda: tell("note: compiling loops; time limits count without it")
    try:
        app()
    finally:
        if work_time.stood_s >= 1:
            later = ", which no later run needs; `optsched warmup` compiles all that commands use"
            tell(f"note: compiling loops took {work_time.stood_s:.0f} s{later * (not UNKEPT)}")
