"""The notebooks as pages: they run when the site is built, and show what they print and draw."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "notebooks"
TO_NOTEBOOK = re.compile(r"\]\(\.\./((?:\.\./)*notebooks/\w+)\.ipynb\)")
BETWEEN = re.compile(r"\]\((\w+)\.ipynb\)")
TO_DOCS = re.compile(r"\]\(\.\./docs/")


def on_files(files: Any, *, config: Any) -> Any:
    """Add a page for each notebook, and its pictures."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        run = config.extra["run_notebooks"]
        notebook = executed(path) if run else nbformat.read(path, as_version=4)
        text, pictures = as_page(notebook, path.stem)
        if not run:
            text += "\n!!! note\n\n    This build has not run the notebook.\n"
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to a notebook, which is outside of ``docs/``, to its page."""
    return TO_NOTEBOOK.sub(r"](\1.md)", markdown)


def executed(path: Path) -> Any:
    """Return a notebook with its outputs. It runs if it, or anything that it uses, has changed."""
    used = [path, *(p for room in ("optsched", "models", "instances") for p in files_of(room))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in used)).hexdigest()
    kept = CACHE / f"{path.stem}-{digest[:16]}.ipynb"
    if not kept.is_file():
        notebook = nbformat.read(path, as_version=4)
        # A trace of the reader's own would change what the page shows.
        environment = {name: v for name, v in os.environ.items() if name != "OPTSCHED_DATA"}
        settings = ["--InlineBackend.figure_formats={'retina'}", "--IPKernelApp.log_level=ERROR"]
        client = NotebookClient(
            notebook, timeout=600, extra_arguments=settings,
            resources={"metadata": {"path": str(path.parent)}},
        )  # fmt: skip
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            raise PluginError(f"notebooks/{path.name}: {error}") from error
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob(f"{path.stem}-*.ipynb"):
            old.unlink()
        nbformat.write(notebook, kept)
    return nbformat.read(kept, as_version=4)


def files_of(room: str) -> list[Path]:
    """Return the files that decide what optsched computes, in a fixed order."""
    return sorted(p for p in (ROOT / room).rglob("*") if p.suffix in {".py", ".json"})


def as_page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and the pictures that it shows, by file name."""
    parts, pictures, section = [], {}, name
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            section = (re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE) or [section])[-1]
            text = TO_DOCS.sub("](../", BETWEEN.sub(r"](\1.md)", cell.source))
            parts.append(text)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = ""
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if output.output_type == "stream":
                printed += output.text
            elif "image/png" in data:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                width = output.metadata.get("image/png", {}).get("width", 700)
                picture = f'![{section}]({file}){{ .picture width="{width}" }}'
                parts.append(f"[{picture}]({file})")
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
            elif "text/html" in data:
                parts.append(as_table(data["text/html"]))
            elif "text/plain" in data:
                printed += data["text/plain"] + "\n"
        if printed:
            parts.append(f"``` {{ .text .output }}\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def as_table(html: str) -> str:
    """Return the table of an output without the style that it brings along."""
    html = re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL)
    html = re.sub(r"<(table|tr)\b[^>]*>", r"<\1>", html)
    return f'<div class="output">{"".join(map(str.strip, html.splitlines()))}</div>'
