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


def check_declared(source: Source, line: int, fields: Mapping[str, Any]) -> None:
    """Read or refuse what an object says of its file; of a file of any fields, nothing.

    The tokens of a block are those that an id stands for. The user or an earlier object may not
    say otherwise.
    """
    form = source.form
    if form is None or "columns" in form.options:
        return

    # Names that mean a version, the scope of ids, or the tokens of a block.
    for name in fields.keys() & _ALL:
        value, expected = fields[name], ""
        if value is None:
            continue
        if name in _VERSIONS and str(value).casefold() not in _FIRST:
            expected = "1, the only version that is read"
        elif name == "hash_id_scope" and form.ids_tokens and value not in form.scopes:
            expected = f"{' or '.join(map(repr, form.scopes))} in the format {form.name!r}"
        elif name in _BLOCKS and form.ids_tokens > 1:
            # 0 stands for what is no number of tokens, which an earlier number makes wrong, too.
            tokens = exact_whole(str(value)) or 0
            known = source.findings.ids_tokens or max(tokens, 0)
            source.findings.ids_tokens = known
            if not known:
                expected = "tokens of a block"
            elif known != tokens:
                expected = f"{known} as before or in --ids-tokens"

        if expected:
            raise source.findings.at(line, f"{name}: found {value!r:.40}; expected {expected}")


def strategy_clients(run: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """Return in words that a run's strategy has clients, and their number, in GuideLLM's fields.

    The number is None if the file does not say it, and all is None in open traffic.
    """
    for name in ("config", "args"):
        settings: Any = run.get(name)
        strategy: Any = settings.get("strategy") if isinstance(settings, dict) else None
        if not isinstance(strategy, dict):  # its kind alone
            strategy = {"type_": strategy}

        kind = str(strategy.get("type_", strategy.get("type")))
        if kind in ("synchronous", "concurrent", "throughput"):
            # The number of clients stands under one of these names.
            counts = [strategy.get(key) for key in ("streams", "max_concurrency", "rate")]
            known = next((exact_whole(str(n)) for n in counts if n is not None), None)
            words = f"the file says that its strategy is {kind}"
            return words, 1 if kind == "synchronous" else known

    return None


def check_unit(source: Source, line: int, fields: Mapping[str, Any], default: str) -> None:
    """Refuse an object that says another unit of its times than that in which they are read."""
    used = source.unit("arrival", default)
    for name in fields.keys() & _UNITS:
        unit = UNIT_WORDS.get(str(fields[name]).casefold(), used)
        if unit != used:
            words = f"{name}: found {fields[name]!r:.40}; expected {used}; --unit {unit} reads it"
            raise source.findings.at(line, words)
