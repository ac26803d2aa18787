"""Conversations as text: ShareGPT and LMSYS-Chat-1M, in JSON or Parquet.

A conversation is one request. Its first question is the prompt, and the answer is the output.
Turns have ``from`` and ``value`` in ShareGPT, and ``role`` and ``content`` in LMSYS-Chat-1M
(Zheng et al. 2023).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, has_word, trace_format, words
from optsched.workloads.traces.json_objects import UnreadableError, member, objects_in_blocks
from optsched.workloads.traces.parquet import is_parquet, parquet_columns, parquet_rows

_LONG_WORD = 1000
_USERS = ("human", "user")
_MODELS = ("gpt", "assistant", "chatgpt", "bard", "bing")


def _read(source: Source, names: tuple[str, ...]) -> Iterator[Block]:
    """Yield one row per conversation, with 0 tokens for a missing question or answer."""
    packed = is_parquet(source.path)
    for rows in _from_parquet(source, names) if packed else objects_in_blocks(source, rows=1024):
        sizes: list[tuple[int, ...]] = []
        for line, row in rows:
            try:
                turns = member(source.path, line, row, *names)
                sizes.append((line, *_sizes(source, line, turns)))
            except UnreadableError as error:
                source.findings.skip(line, error)

        if sizes:
            yield Block(*np.array(sizes, dtype=np.int64).T)


def _from_parquet(
    source: Source, names: tuple[str, ...]
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    found = parquet_columns(source.path)
    name = next((name for name in names if name in found), None)
    if name is None:
        raise InputError(f"{source.path}: expected a column {names[0]}; found {', '.join(found)}")
    for first, batch in parquet_rows(source.path, source.window, [name], batch_rows=1024):
        turns = batch.column(name).to_pylist()
        yield [(line, {name: value}) for line, value in enumerate(turns, start=first)]


def _sizes(source: Source, line: int, turns: Any) -> tuple[int, int]:
    """Return the tokens of the first question and of its answer, 0 where there is none."""
    where = f"{source.path}: line {line}"
    if not isinstance(turns, (list, tuple)):
        raise UnreadableError(f"{where}: found {str(turns)[:40]!r}; expected a list of turns")

    question: str | None = None
    for turn in turns:
        if not isinstance(turn, dict):
            found = f"found the turn {str(turn)[:40]!r}; expected an object with named fields"
            raise UnreadableError(f"{where}: {found}")

        role = str(turn.get("from", turn.get("role", ""))).lower()
        if role not in (_USERS if question is None else _MODELS):
            continue

        text = turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            found = f"found {str(text)[:40]!r}; expected a text"
            raise UnreadableError(f"{where}: turn of {role!r}: {found}")
        if question is not None:
            return _tokens(source, line, question), _tokens(source, line, text)

        question = text

    return 0 if question is None else _tokens(source, line, question), 0


def _tokens(source: Source, line: int, text: str) -> int:
    count = source.count(text)
    if source.count is words and len(text) > _LONG_WORD and has_word(text, _LONG_WORD):
        source.findings.odd(
            f"texts have words of more than {_LONG_WORD} characters, which count as one token; "
            "tokenizer=NAME (--tokenizer NAME) counts a model's",
            line,
            rows=1,
        )

    return count


for _name, _words, _names in (
    ("sharegpt", "ShareGPT", ("conversations", "conversation", "items", "messages")),
    ("lmsys", "LMSYS-Chat-1M", ("conversation", "conversations")),
):
    _summary = f"{_words} conversations (JSON or Parquet)"
    trace_format(_name, _summary, options=("tokenizer",))(partial(_read, names=_names))
