"""``data``: list and download public traces."""

from functools import partial
from typing import Annotated, Any

import typer

from optsched.cli.options import ABOVE_0, AT_LEAST_0, command
from optsched.cli.output import LiveLine, show_table, tell

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


@app.command()
@command
def fetch(
    name: str,
    to: str | None = None,
    base_url: str | None = None,
    retries: Annotated[int, AT_LEAST_0] = 2,
    timeout: Annotated[float, ABOVE_0] = 30.0,
) -> None:
    """Download a public trace, check it, and print the name of its file.

    Parameters:
      name NAME: The dataset. `optsched data list` lists them.
      to DIR: The folder for the file. By default it is the user's cache.
      base_url URL: The address of a mirror. By default it is OPTSCHED_DATA_URL, or the publisher's.
      retries N: How often to try again after a failure.
      timeout S: The max time in seconds without an answer of the server.
    """
    from optsched.workloads.datasets import datasets, fetch_dataset

    with LiveLine() as line:
        progress = partial(line.downloaded, name)
        limits: dict[str, Any] = {"retries": retries, "timeout_s": timeout}
        file = fetch_dataset(name, to, base_url=base_url, progress=progress, **limits)

    one = datasets()[name]
    tell(f"{one.licence}; cite {one.cite}; format {one.format}")
    print(file)
