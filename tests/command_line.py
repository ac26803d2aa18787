"""The command line in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from optsched.cli import app


def invoke(*words: object) -> Any:
    """Run the command line; return its exit status, standard output and error."""
    return CliRunner().invoke(app, [str(word) for word in words])


def run(*words: object, status: int = 0) -> str:
    """Run the command line, which must end with a status; return all that it says."""
    result = invoke(*words)
    assert result.exit_code == status, result.output
    return str(result.output)


def answer(*words: object, status: int = 0) -> dict[str, Any]:
    """Run the command line, which must end with a status; return its JSON."""
    result = invoke(*words, "--json", "-")
    assert result.exit_code == status, (result.stdout, result.stderr)
    return dict(json.loads(result.stdout))


def one_line_error(result: Any, status: int = 2) -> str:
    """Return the error of a command that failed with a status and said nothing else."""
    assert result.exit_code == status, (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert result.stdout == ""
    return str(lines[0])
