"""What a file says of itself beside its requests: blocks and scope of ids, version, unit."""

from collections.abc import Mapping
from typing import Any

from optsched.workloads.traces.base import Source
from optsched.workloads.traces.exact import UNIT_WORDS, exact_whole

_BLOCKS = {"block_size", "hash_block_size", "hash_id_block_size", "tokens_per_block"}
_VERSIONS = {"version", "format_version", "schema_version", "trace_version", "schema"}
_FIRST = ("1", "1.0", "v1")
_UNITS = {"unit", "units", "time_unit", "time_units"}
_ALL = {*_BLOCKS, *_VERSIONS, "hash_id_scope"}


def check_declared(source: Source, line: int, found: Mapping[str, Any]) -> None:
    """Read or refuse what an object says of its file; of a file of any fields, nothing.

    The tokens of a block are those that an id stands for. The user or an earlier object may not
    say otherwise.
    """
    form = source.form
    if form is None or "columns" in form.options:
        return

    for name in found.keys() & _ALL:
        value, right = found[name], ""
        if value is None:
            continue
        if name in _VERSIONS and str(value).casefold() not in _FIRST:
            right = "1, the only version that is read"
        elif name == "hash_id_scope" and form.ids_tokens and value not in form.scopes:
            right = f"{' or '.join(map(repr, form.scopes))} in the format {form.name!r}"
        elif name in _BLOCKS and form.ids_tokens > 1:
            tokens = exact_whole(str(value)) or 0
            said = source.findings.ids_tokens or max(tokens, 0)
            source.findings.ids_tokens = said
            if not said or said != tokens:
                right = f"{said} as before or in --ids-tokens" if said else "tokens of a block"

        if right:
            raise source.findings.at(line, f"{name}: found {value!r:.40}; expected {right}")


def strategy_clients(run: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """Return how many clients a run's strategy has, in GuideLLM's words; None in open traffic."""
    for name in ("config", "args"):
        inside: Any = run.get(name)
        strategy = inside.get("strategy") if isinstance(inside, dict) else None
        given: Any = strategy if isinstance(strategy, dict) else {"type_": strategy}
        kind = str(given.get("type_", given.get("type")))
        if kind in ("synchronous", "concurrent", "throughput"):
            counts = [given.get(key) for key in ("streams", "max_concurrency", "rate")]
            known = next((exact_whole(str(one)) for one in counts if one is not None), None)
            words = f"the file says that its strategy is {kind}"
            return words, 1 if kind == "synchronous" else known

    return None


def check_unit(source: Source, line: int, found: Mapping[str, Any], default: str) -> None:
    """Refuse an object that says another unit of its times than that in which they are read."""
    used = source.unit("arrival", default)
    for name in found.keys() & _UNITS:
        said = UNIT_WORDS.get(str(found[name]).casefold(), used)
        if said != used:
            raise source.findings.at(
                line, f"{name}: found {found[name]!r:.40}; expected {used}; --unit {said} reads it"
            )
