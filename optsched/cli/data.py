"""``data``: list and download public traces."""

from __future__ import annotations

import sys
from functools import partial

import typer

from optsched.cli.options import above_0, argument, at_least_0, option
from optsched.cli.output import LiveLine, show_table

app = typer.Typer(help="List and download public traces.", no_args_is_help=False)


@app.command("list")
def list_datasets() -> None:
    """List the public traces."""
    from optsched.workloads.datasets import cached, datasets

    rows = [
        (name, one.format, one.summary, one.licence, "yes" if cached(name) else "no")
        for name, one in datasets().items()
    ]
    show_table(("dataset", "format", "summary", "licence", "here"), rows, text_columns=range(5))
    print("\nhere: whether the user's cache has it; `optsched data fetch NAME` puts it there")

    for name, one in datasets().items():
        if one.reported:
            print(f"{name}: its sha256 is one that others report; the first download verifies it")


@app.command("fetch")
def fetch(
    name: str = argument("NAME", "The dataset. `optsched data list` lists them."),
    to: str | None = option("DIR", "The folder for the file. By default it is the user's cache."),
    base_url: str | None = option(
        "URL", "The address of a mirror. By default it is OPTSCHED_DATA_URL, or the publisher's."
    ),
    retries: int = option("N", "How often to try again after a failure.", 2, callback=at_least_0),
    timeout: float = option(
        "S", "The max time in seconds without an answer of the server.", 30.0, callback=above_0
    ),
) -> None:
    """Download a public trace, check it, and print the name of its file.

    A download that was interrupted goes on where it ended.
    """
    from optsched.workloads.datasets import datasets, fetch_dataset

    try:
        with LiveLine() as line:
            file = fetch_dataset(
                name,
                to,
                base_url=base_url,
                retries=retries,
                timeout_s=timeout,
                progress=partial(line.downloaded, name),
            )
    except KeyboardInterrupt:
        print(
            "error: interrupted: the downloaded part is kept; the same command goes on",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None

    one = datasets()[name]
    print(f"{one.licence}; cite {one.cite}; format {one.format}", file=sys.stderr)
    print(file)
