"""Conversations as text: ShareGPT and LMSYS-Chat-1M, in JSON or Parquet.

A conversation is one request. Its first question is the prompt, and the answer is the output. In
closed loop it is a session, with a request for each answer.
Turns have ``from`` and ``value`` in ShareGPT, and ``role`` and ``content`` in LMSYS-Chat-1M
(Zheng et al. 2023).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from optsched.problem.errors import InputError
from optsched.workloads.traces.base import Block, Source, has_word, objects, trace_format, words
from optsched.workloads.traces.json_objects import UnreadableError, member, objects_in_blocks
from optsched.workloads.traces.parquet import is_parquet, parquet_columns, parquet_rows

_LONG_WORD = 1000
_USERS = ("human", "user")
_MODELS = ("gpt", "assistant", "chatgpt", "bard", "bing")


class _Turn(NamedTuple):
    """A question with all of the conversation before it, and the answer, in tokens."""

    line: int
    talk: int
    prompt: int
    output: int
    ids: list[Any]


def _read(source: Source, names: tuple[str, ...]) -> Iterator[Block]:
    """Yield one row per conversation, with 0 tokens for a missing question or answer.

    In closed loop it is one for each answer, and turns follow one another at once.
    """
    packed, talks = is_parquet(source.path), 0
    for rows in _from_parquet(source, names) if packed else objects_in_blocks(source, rows=1024):
        found = list[_Turn]()
        for line, row in rows:
            talks += 1
            source.findings.fields += names[0] in row
            try:
                turns = member(source.path, line, row, *names)
                found += [_Turn(line, talks, *one) for one in _turns(source, line, turns)]
            except UnreadableError as error:
                source.findings.skip(line, error)

        if found:
            yield _block(source, found)


def _block(source: Source, found: list[_Turn]) -> Block:
    line, _, prompt, output = np.array([one[:4] for one in found], dtype=np.int64).T
    ids, calls, last = None, list[Any](), dict[int, tuple[int, int]]()
    if source.shared and not any(None in one.ids for one in found):
        ids = objects([one.ids for one in found])

    for k, one in enumerate(found):
        calls.append(((one.talk, k), (last[one.talk],) if one.talk in last else (), 0))
        if one.prompt and one.output:
            last[one.talk] = one.talk, k

    if not source.closed:
        return Block(line, prompt, output, ids=ids)

    follows = np.array([[one.talk] * 2 for one in found], dtype=object)
    return Block(line, prompt, output, ids=ids, follows=follows, calls=objects(calls))


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


def _turns(source: Source, line: int, turns: Any) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield the tokens of each question and its answer, or of the first, 0 where there is none."""
    where = f"{source.path}: line {line}"
    if not isinstance(turns, (list, tuple)):
        raise UnreadableError(f"{where}: found {str(turns)[:40]!r}; expected a list of turns")

    before, question, answered = list[Any](), None, False
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

        tokens = _tokens(source, line, text)
        if question is None:
            question = tokens
            continue

        prompt, answered = [*before, *question], True
        before, question = [*prompt, *tokens], None
        yield len(prompt), len(tokens), before
        if not source.closed:
            return

    if not answered:
        yield len(question or ()), 0, []


def _tokens(source: Source, line: int, text: str) -> Sequence[Any]:
    tokens = source.tokens(text)
    if source.tokens is words and len(text) > _LONG_WORD and has_word(text, _LONG_WORD):
        source.findings.odd(
            f"texts have words of more than {_LONG_WORD} characters, which count as one token; "
            "tokenizer=NAME (--tokenizer NAME) counts a model's",
            line,
            rows=1,
        )

    return tokens


for _name, _words, _names in (
    ("sharegpt", "ShareGPT", ("conversations", "conversation", "items", "messages")),
    ("lmsys", "LMSYS-Chat-1M", ("conversation", "conversations")),
):
    _summary = f"{_words} conversations (JSON or Parquet)"
    _options = ("tokenizer", "sessions")
    trace_format(_name, _summary, options=_options, ids_tokens=1)(partial(_read, names=_names))
