"""How many tokens a text has: words, a user's function, or a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from optsched.problem.errors import InputError
from optsched.problem.specs import is_file, load_attribute


def token_counter(tokenizer: str | Callable[[str], int] | None) -> Callable[[str], int]:
    """Return the function that counts the tokens of a text.

    Parameters
    ----------
    tokenizer : str or callable, optional
        None: words, as Jaillet et al. (2025) count. A function of a text that returns its tokens
        or their number, as itself or as ``file.py:NAME``. A ``tokenizer.json``, or a Hugging Face
        name, for the package tokenizers (or transformers).

    Raises
    ------
    InputError
        A file or name that gives no tokenizer, or neither package; later, a function that
        fails or does not return a count.
    """
    if tokenizer is None:
        return lambda text: len(text.split())
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
            f"tokenizer {name!r}: returns {str(found)[:40]!r}; a list of tokens or their number "
            "is right"
        )

    return count


def _hugging_face(name: str) -> Callable[[str], int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return _transformers(name)
    try:
        if Path(name).is_file():
            loaded = Tokenizer.from_file(name)
        else:
            loaded = Tokenizer.from_pretrained(name)
    except Exception as error:  # the package raises bare exceptions
        raise InputError(f"tokenizer {name!r}: cannot be loaded: {error}") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _transformers(name: str) -> Callable[[str], int]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError(
            f"tokenizer {name!r}: needs the package tokenizers or transformers; install one "
            "(pip install tokenizers), give file.py:NAME, or count words without a tokenizer"
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise InputError(f"tokenizer {name!r}: cannot be loaded: {error}") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False))
