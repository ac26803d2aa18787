"""What the site does beyond mkdocs: formulas, links to the reference, tables made from files."""

from __future__ import annotations

import html
import importlib.util
import inspect
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
NAME = re.compile(r"(<a\b[^>]*>)?<code>(optsched(?:\.\w+)+)</code>")
NAMES = re.compile(r"\A---\npolicies: \[(.*?)\]\n---\n")


def on_config(config: Any, **_: Any) -> Any:
    """Show the list of versions where mike builds one of several, beside which that list lies."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put what the registry knows of a page's policies (front matter) into it, and other tables."""
    for mark, made in TABLES.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    names = page.meta.get("policies", [])
    if not names:
        return markdown
    if names == "all":
        return f"{markdown}\n\n{facts(list(pages()), pages())}\n"
    title, _, rest = markdown.lstrip().partition("\n")
    return f"{title}\n\n{facts(names, {})}\n{rest}"


def pages() -> dict[str, str]:
    """Return the page of each policy that has one, by name."""
    found = {}
    for page in sorted((Path(__file__).parent.parent / "policies").glob("*.md")):
        match = NAMES.match(page.read_text(encoding="utf-8"))
        for name in match[1].split(",") if match else []:
            found[name.strip()] = page.name
    return dict(sorted(found.items()))


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML, which needs no script, and names of the API into links."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        return convert(html.unescape(match[3]), display=display)

    def link(match: re.Match[str]) -> str:
        if match[1]:
            return match[0]
        return f'<autoref identifier="{match[2]}" optional><code>{match[2]}</code></autoref>'

    content = FORMULA.sub(mathml, content)
    content = content.replace("::</p>", ":</p>")  # before code, in docstrings
    return NAME.sub(link, content)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the JSON Schemas of all formats to the addresses that they name."""
    from optsched.files.schemas import HOME, MODELS, schema

    for name in MODELS:
        made = schema(name)
        file = Path(config.site_dir) / made["$id"].removeprefix(f"{HOME}/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def facts(names: list[str], links: dict[str, str]) -> str:
    """Return a table of policies as Markdown: rule, parameters, lengths, source."""
    from optsched.policies import list_policies

    lines = ["| policy | rule | parameters | output lengths | source |", "|---|---|---|---|---|"]
    for name in names:
        info = list_policies()[name]
        parameters = ", ".join(
            f"`{key}`" if p.default is inspect.Parameter.empty else f"`{key}={_text(p.default)}`"
            for key, p in info.parameters.items()
        )
        lengths = "used" if info.clairvoyant else "not used"
        title = f"[`{name}`]({links[name]})" if name in links else f"`{name}`"
        cells = (title, info.summary, parameters or "-", lengths, info.paper or "ours")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def instances() -> str:
    """Return tables of the library's instances, by family."""
    from optsched.files.library import read_library

    file = ROOT / "benchmarks" / "library.py"
    spec = importlib.util.spec_from_file_location("build_library", file)
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return str(build.tables(read_library()))


def formats() -> str:
    """Return a section for each format of traces, with the names of its columns."""
    from optsched.workloads.traces import trace_formats

    file = ROOT / "optsched" / "workloads" / "traces" / "layouts.toml"
    layouts = tomllib.loads(file.read_text(encoding="utf-8"))
    sections = []
    for name, summary in trace_formats().items():
        layout = layouts.get(name, {})
        lines = [f"### {name}", "", f"{summary}."]
        if layout:
            lines += ["", "| field | names in the file | unit |", "|---|---|---|"]
        for field, names in layout.get("names", {}).items():
            unit = layout.get("units", {}).get(field, layout.get("unit", "s"))
            shown = " or ".join(f"`{one}`" for one in names.split(" | "))
            lines.append(f"| `{field}` | {shown} | {'' if 'tokens' in field else unit} |")
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def metrics() -> str:
    """Return a table of the metrics."""
    from optsched.problem.metrics import TABLE

    lines = ["| key | in tables | unit | better | meaning |", "|---|---|---|---|---|"]
    for metric in TABLE.values():
        better = "more" if metric.sense == "max" else "less"
        cells = (f"`{metric.name}`", metric.words, metric.unit, better, metric.meaning)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {
    "<!-- instances -->": instances,
    "<!-- formats -->": formats,
    "<!-- metrics -->": metrics,
}


def _text(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
