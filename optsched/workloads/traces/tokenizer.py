"""The tokens of a text, by words, a user's function or a Hugging Face tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from optsched.problem.errors import InputError
from optsched.problem.specs import is_file, load_attribute
from optsched.workloads.traces.base import words


def tokens_of(tokenizer: str | Callable[[str], Any] | None) -> Callable[[str], Sequence[Any]]:
    """Return the function that splits a text into tokens.

    Without a tokenizer words count, as in Jaillet et al. 2025, and characters of scripts without
    spaces. It is a function, or ``file.py:NAME``, from a text to its tokens or their number, or
    else a ``tokenizer.json`` or a name on Hugging Face, for the package tokenizers. Where only the
    number is known, each token is None.
    """
    if tokenizer is None:
        return words
    if callable(tokenizer):
        return _checked(tokenizer, repr(tokenizer))
    if is_file(tokenizer):
        return _checked(load_attribute(tokenizer, "tokenizer"), tokenizer)

    return _hugging_face(tokenizer)


def _checked(function: Callable[[str], Any], name: str) -> Callable[[str], Sequence[Any]]:
    """Return a user's function with its answers checked, and turned into sequences."""

    def split(text: str) -> Sequence[Any]:
        try:
            answer = function(text)
        except Exception as error:
            raise InputError(f"tokenizer {name!r}: fails on {text[:40]!r}: {error!r}") from error

        if isinstance(answer, int) and not isinstance(answer, bool):
            return [None] * answer
        if hasattr(answer, "__len__") and not isinstance(answer, (str, dict)):
            return list(answer)

        raise InputError(
            f"tokenizer {name!r}: found the result {str(answer)[:40]!r}; expected a list of tokens "
            "or their number"
        )

    return split


def _hugging_face(name: str) -> Callable[[str], Sequence[Any]]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError(
            f"tokenizer {name!r}: needs the package tokenizers; install it (pip install "
            "tokenizers), give file.py:NAME, or count words without a tokenizer"
        ) from None

    try:
        load = Tokenizer.from_file if Path(name).is_file() else Tokenizer.from_pretrained
        loaded = load(name)
    except Exception as error:  # the package raises bare exceptions
        raise InputError(f"tokenizer {name!r}: cannot be loaded: {error}") from None

    return lambda text: loaded.encode(text, add_special_tokens=False).ids
