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
    """A question with all of the conversation before it, and the answer, in tokens.

    `talk`: number of the conversation. `ids`: the tokens of both, each None if only their number is
    known.
    """

    line: int
    talk: int
    prompt: int
    output: int
    ids: list[Any]


def _read(source: Source, names: tuple[str, ...]) -> Iterator[Block]:
    """Yield one row per conversation, with 0 tokens for a missing question or answer.

    In closed loop it is one for each answer, and turns follow one another at once. `names`: the
    fields that may hold the turns of a conversation.
    """
    talks = 0
    if is_parquet(source.path):
        blocks = _parquet_blocks(source, names)
    else:
        blocks = objects_in_blocks(source, rows=1024)

    for rows in blocks:
        turns = list[_Turn]()
        for line, row in rows:
            talks += 1
            source.findings.fields += names[0] in row  # for `recognize`, which compares formats
            try:
                talk = member(source.path, line, row, *names)
                turns += [_Turn(line, talks, *turn) for turn in _turns(source, line, talk)]
            except UnreadableError as error:
                source.findings.skip(line, error)

        if turns:
            yield _block(source, turns)


def _block(source: Source, turns: list[_Turn]) -> Block:
    """Return turns as rows: in closed loop calls, each after the last one of its conversation."""
    # The first four fields: line, conversation, prompt and output.
    line, _, prompt, output = np.array([turn[:4] for turn in turns], dtype=np.int64).T
    ids = None
    if source.shared and not any(None in turn.ids for turn in turns):
        ids = objects([turn.ids for turn in turns])
    if not source.closed:
        return Block(line, prompt, output, ids=ids)

    # A call is its name, the names of those before it, and 0 ns between (`Block.calls`). `last`:
    # the name of the last one by conversation.
    calls, last = list[Any](), dict[int, tuple[int, int]]()
    for k, turn in enumerate(turns):
        before = (last[turn.talk],) if turn.talk in last else ()
        calls.append(((turn.talk, k), before, 0))
        if turn.prompt and turn.output:  # else it is left out, and nobody comes after it
            last[turn.talk] = turn.talk, k

    # Turns have the name of their conversation, so each goes on behind the last one of that name.
    follows = np.array([[turn.talk] * 2 for turn in turns], dtype=object)
    return Block(line, prompt, output, ids=ids, follows=follows, calls=objects(calls))


def _parquet_blocks(
    source: Source, names: tuple[str, ...]
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Yield rows with their lines, as `objects_in_blocks` does of JSON."""
    columns = parquet_columns(source.path)
    name = next((name for name in names if name in columns), None)
    if name is None:
        raise InputError(f"{source.path}: expected a column {names[0]}; found {', '.join(columns)}")
    for first, batch in parquet_rows(source.path, source.window, [name], batch_rows=1024):
        turns = batch.column(name).to_pylist()
        yield [(line, {name: value}) for line, value in enumerate(turns, start=first)]


def _turns(source: Source, line: int, turns: Any) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield, for each answer, the numbers of its prompt and output tokens, and the tokens of both.

    A prompt is the question and all turns before it. In open loop only the first answer counts, and
    a conversation without any yields 0 output tokens.
    """
    where = f"{source.path}: line {line}"
    if not isinstance(turns, (list, tuple)):
        raise UnreadableError(f"{where}: found {str(turns)[:40]!r}; expected a list of turns")

    # `before`: the tokens of all turns that are over. `question`: those of one without an answer.
    before, question, answered = list[Any](), None, False
    for turn in turns:
        if not isinstance(turn, dict):
            found = f"found the turn {str(turn)[:40]!r}; expected an object with named fields"
            raise UnreadableError(f"{where}: {found}")

        role = str(turn.get("from", turn.get("role", ""))).lower()
        if role not in (_USERS if question is None else _MODELS):
            continue  # a system's turn, or one that nobody asked for

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
        yield len(question or ()), 0, []  # a row without an output, which is dropped and counted


def _tokens(source: Source, line: int, text: str) -> Sequence[Any]:
    """Return the tokens of a text, and tell the findings where words are a bad count of them."""
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
