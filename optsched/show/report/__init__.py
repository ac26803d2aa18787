"""One self-contained HTML file about instances, results, comparisons, capacities and schedules.

It needs the package of the extra ``report``, but no network. The figures are inside, and the
content policy forbids the page to load anything. All texts from files are escaped.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from optsched.files.outputs import write_bytes
from optsched.problem.errors import UsageError


def write_report(
    files: Sequence[str | Path],
    path: str | Path,
    *,
    cost_model: str | None = None,
) -> None:
    """Write a report of files as one HTML file.

    Parameters
    ----------
    files : sequence of path
        Results, comparisons, capacities, splits, diagnoses, certificates, schedules and instances,
        in any order.
        Shipped instances can also be given by name. The digest of the instance says which files
        belong together. Schedules and certificates that results name are read if their files are
        there.
    path : path
        The HTML file.
    cost_model : str, optional
        For schedules in seconds whose files name none that is shipped.

    Raises
    ------
    UsageError
        The package jinja2 is missing, or no file is given.
    InputError, ViolationError
        A file that cannot be read, or a schedule that the judge refuses.
    """
    if find_spec("jinja2") is None:
        raise UsageError(
            "report: needs the package jinja2; install it by `pip install 'optsched[report]'`"
        )

    from optsched.show.report.gather import gather
    from optsched.show.report.page import render

    # A file's name need not be UTF-8.
    write_bytes(render(gather(files, cost_model)).encode(errors="backslashreplace"), path)
