"""Counting the tokens of a text, by words, a user's function or a Hugging Face tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from optsched.problem.errors import InputError
from optsched.problem.specs import is_file, load_attribute
from optsched.workloads.traces.base import words


def token_counter(tokenizer: str | Callable[[str], int] | None) -> Callable[[str], int]:
    """Return the function that counts the tokens of a text.

    Without a tokenizer words count, as in Jaillet et al. 2025, and characters of scripts without
    spaces. It is a function, or ``file.py:NAME``, from a text to its tokens or their number, or
    else a ``tokenizer.json`` or a name on Hugging Face, for the package tokenizers.
    """
    if tokenizer is None:
        return words
    if callable(tokenizer):
        return _checked(tokenizer, repr(tokenizer))
    if is_file(tokenizer):
        return _checked(load_attribute(tokenizer, "tokenizer"), tokenizer)

    return _hugging_face(tokenizer)


def _checked(function: Callable[[str], Any], name: str) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            found = function(text)
        except Exception as error:
            raise InputError(f"tokenizer {name!r}: fails on {text[:40]!r}: {error!r}") from error

        if isinstance(found, int) and not isinstance(found, bool):
            return found
        if hasattr(found, "__len__") and not isinstance(found, (str, dict)):
            return len(found)

        raise InputError(
            f"tokenizer {name!r}: found the result {str(found)[:40]!r}; expected a list of tokens "
            "or their number"
        )

    return count


def _hugging_face(name: str) -> Callable[[str], int]:
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

    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
