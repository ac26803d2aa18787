"""Columns that say whether a request was served, and other columns that identify a row."""

import re

import numpy as np

from optsched.workloads.traces.exact import Fields, Mask

_STATUS = (
    "status|state|outcome|success|succeeded|successful|is_success|ok|error|errors|is_error|"
    "has_error|error_message|error_msg|error_type|error_code|exception|failed|failure|cancelled|"
    "canceled|was_cancelled|aborted|timed_out|status_code|status_message|http_status|"
    "http_status_code|response_status|response_code|request_status|http_code|finish_reason|level"
)
NAMES = _STATUS.split("|")
"""Names of columns that say whether a request was served."""

_IDENTITY = (
    "model|model_name|model_id|server|endpoint|phase|run_id|instance|instance_id|replica|"
    "replica_id|engine|host|hostname|node|device|gpu|hardware"
)
IDENTITY_NAMES = _IDENTITY.split("|")
"""Names of columns of which an instance expects one value."""

CLIENT_NAMES = ["max_concurrency", "concurrency", "num_concurrent_requests", "num_clients"]
"""Names of columns with the number of clients of a run."""

UNIT_NAMES = ["unit", "units", "time_unit", "time_units"]

_NOTHING = re.compile(r"|null|none|nan|\[\]|\{\}|no_error|no|false|0|ok")
_GOOD = re.compile(
    "ok|okay|success|succeeded|successful|complete|completed|finished|done|passed|served|true|yes|"
    "stop|length|eos|end_turn|max_tokens|tool_calls|status_code_ok|status_code_unset|unset|"
    "finished_stopped|finished_length_capped|default|debug|info|warning"
)
_BAD = re.compile(
    r"err(or|$)|fail|time_?d?_?out|cancel|abort|reject|drop|(in|not_|un)(complete|finish|serv)|"
    r"^(false|no)$|excep|expire|kill|refuse|throttle|rate_limit|crash|ignored"
)
_TELLS_FAILURE = re.compile(
    r"err|fail|exception|cancel|abort|timed_?out|timeout|cache_?hit", re.IGNORECASE
)
_TELLS_SUCCESS = re.compile(r"succe|(^|[._])(is_?)?(ok|completed?|done|served)$", re.IGNORECASE)


def lists_errors(name: str) -> bool:
    """Return whether a column of this name is empty unless a request failed."""
    return _TELLS_FAILURE.search(name) is not None


def failed_rows(rows: Fields, field: str, success: frozenset[str]) -> tuple[Mask, Mask]:
    """Return the rows that a column of statuses calls failed, and those with no known word.

    ``success`` has further words of success.
    """
    column, name = rows.columns[field].tolist(), rows.names[field]
    good = {word: _is_good(word, name, success) for word in set(column)}
    failed = np.array([good[word] is False for word in column], dtype=bool)
    unknown = np.array([good[word] is None for word in column], dtype=bool)
    return failed, unknown


def _is_good(word: str, name: str, success: frozenset[str]) -> bool | None:
    """Return whether a word of a column of this name means success; None if that is unknown."""
    # The user's words come first, then what the column's name tells, and then the word itself.
    plain = word.casefold().replace(" ", "_").removeprefix("statuscode.")
    if word in success or plain in success:
        return True
    if lists_errors(name):  # an error, or whether there was one
        return _NOTHING.fullmatch(plain) is not None or _http(plain) is True
    if _TELLS_SUCCESS.search(name) and plain in ("0", "1"):  # a flag
        return plain == "1"
    if _GOOD.fullmatch(plain):
        return True

    return False if _BAD.search(plain) else _http(plain)


def _http(word: str) -> bool | None:
    """Return whether a number is an HTTP status of success, None if it is no HTTP status."""
    number = word.removesuffix(".0")
    if not (number.isdigit() and len(number) == 3 and "1" <= number[0] <= "5"):
        return None

    return number[0] == "2"
