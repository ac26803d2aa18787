"""Forecasts: what is predicted of a request as it runs, and that nobody sees it earlier."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from slow_judge import random_instance
from typer.testing import CliRunner

from optsched.cli import app
from optsched.files.read_write import read_instance, write_instance
from optsched.policies import is_clairvoyant, make_policy
from optsched.policies.base import Batch, View
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError
from optsched.problem.forecast import Forecast, tokens_left
from optsched.problem.instance import Instance
from optsched.workloads.predict import estimates, forecast_of, predict

# An entry for every 3 tokens: 9 left at first and 5.5 after 3 tokens; 0.25 of the second one.
TWO = Forecast(3, [0, 2, 3], [9.0, 5.5, 0.25])
"""Of two requests, every 3 tokens: 9 tokens at first, then 5.5 more; 0.25 tokens."""


@pytest.fixture
def instance() -> Instance:
    """Two requests with outputs of 6 and 3 tokens, and the forecast TWO."""
    return Instance([0, 1], [1, 2], [6, 3], kv_capacity=40, forecast=TWO)


def test_between_predictions_the_tokens_produced_are_counted_off() -> None:
    # 9, 8, 7 tokens left; after 3 tokens 5.5 are, then 4.5 and 3.5.
    assert [TWO.left(0, k, k) for k in range(6)] == [9, 8, 7, 5.5, 4.5, 3.5]
    # Less than a token cannot be left.
    assert [TWO.left(1, k, k) for k in range(3)] == [1, 1, 1]


def test_a_second_run_remembers_what_the_first_one_was_told() -> None:
    # After 4 tokens the total was 3 + 5.5; started again, with none of them left, 8.5 are to go.
    assert [TWO.left(0, 4, k) for k in (0, 1, 4)] == [8.5, 7.5, 4.5]


def test_points_are_forecasts_of_one_entry(instance: Instance) -> None:
    told = predict(instance, [7, 1.5])
    points = forecast_of(told)
    # 7 less a token each, but 1 at least.
    assert [points.left(0, k, k) for k in range(9)] == [7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert points.left(1, 0, 0) == 2  # rounded up, as everywhere
    truth = forecast_of(instance.without_predictions())
    assert [truth.left(1, k, k) for k in range(3)] == [3, 2, 1]


def test_points_of_a_forecast_are_its_first_entries(instance: Instance) -> None:
    for lengths in ("predicted", "lower", "upper", "hindsight"):
        # 9, and the 0.25 of the second request rounded up.
        points, source = estimates(instance, lengths)
        assert (points.tolist(), source) == ([9, 1], "forecast")
    assert instance.has_predictions
    assert not instance.without_predictions().has_predictions
    assert not is_clairvoyant(*make_policy("mc-sf"), instance)


def test_a_subset_keeps_each_requests_entries(instance: Instance) -> None:
    """TWO has entries 9 and 5.5 of request 0, and 0.25 of request 1: taken by index or by mask."""
    turned = instance.subset([1, 0, 1]).forecast
    assert turned is not None
    assert turned.offsets.tolist() == [0, 1, 3, 4]
    assert turned.remaining.tolist() == [0.25, 9, 5.5, 0.25]
    picked = instance.subset(np.array([False, True])).forecast
    assert picked is not None
    assert picked.remaining.tolist() == [0.25]


def test_files_keep_forecasts_and_the_digest_covers_them(instance: Instance, tmp_path) -> None:
    """Every field of TWO is written and read, and without it the digest is another."""
    file = tmp_path / "told.json"
    write_instance(instance, file)
    data = json.loads(file.read_text())["requests"]["forecast"]
    assert data == {"every": 3, "offsets": [0, 2, 3], "remaining": [9, 5.5, 0.25]}
    again = read_instance(file)
    assert again.sha256 == instance.sha256 != instance.without_predictions().sha256
    assert again.forecast is not None
    assert again.forecast.remaining.tolist() == TWO.remaining.tolist()


def test_predict_writes_a_users_forecast(tmp_path: Path) -> None:
    """The predictor of a file tells the true number of tokens left after each token, and the
    instance keeps that."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from optsched.problem.forecast import Forecast\n"
        "def falling(instance, generator):\n"
        "    o = instance.output_tokens\n"
        "    left = np.concatenate([np.arange(k, 0, -1) for k in o])\n"
        "    return Forecast(1, np.concatenate([[0], np.cumsum(o)]), left)\n"
    )
    out = tmp_path / "told.json"
    spec = f"{tmp_path / 'mine.py'}:falling"
    done = CliRunner().invoke(app, ["export", "tiny", "--predictor", spec, "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "a forecast" in done.output
    told = read_instance(out)
    assert told.forecast is not None
    assert told.forecast.first.tolist() == told.output_tokens.tolist()
    assert told.predicted is None


# --- what cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "offsets", "remaining", "text"),
    [
        (0, [0, 1], [1.0], "requests.forecast.every: found 0"),
        (1.5, [0, 1], [1.0], "every: found 1.5; expected an integer"),
        (1, [], [], "offsets: found .* at the beginning; expected 0"),
        (1, [1, 2], [1.0], "offsets: found .1. at the beginning; expected 0"),
        (1, [0, 2, 2], [1.0, 1.0], "offsets: request 1: found no entry from 2 to 2; expected one"),
        (1, [0, 2, 1], [1.0, 1.0], "offsets: request 1: found no entry from 2 to 1; expected one"),
        (1, [0, 0.5], [1.0], "offsets: entry 1: found 0.5; expected an integer"),
        (1, [0, 1], [1.0, 2.0], "remaining: found 2 values; expected 1, where the offsets end"),
        (1, [0, 2], [1.0], "remaining: found 1 values; expected 2, where the offsets end"),
        (1, [0, 1], ["x"], "remaining: request 0 after 0 tokens: found 'x'; expected a number"),
        (1, [0, 1], [None], "remaining: request 0 after 0 tokens: found None; expected a number"),
        (
            5,
            [0, 1, 3],
            np.array([1, 2, np.nan]),
            "request 1 after 5 tokens: found nan; expected a finite number",
        ),
        (
            5,
            [0, 1, 3],
            np.array([-1, 2, 3.0]),
            "request 0 after 0 tokens: found -1.0; expected a number from 0 to",
        ),
        (
            5,
            [0, 1, 3],
            [1, 2, -2.5],
            "request 1 after 5 tokens: found -2.5; expected a number from 0 to",
        ),
        (5, [0, 1], [10**400], "remaining: request 0 after 0 tokens: found"),
        (5, [0, 1], [True], "remaining: request 0 after 0 tokens: found True; expected a number"),
    ],
)
def test_a_forecast_that_cannot_be_is_refused(every, offsets, remaining, text: str) -> None:
    with pytest.raises(InputError, match=text):
        Forecast(every, offsets, remaining)


@pytest.mark.parametrize(
    ("forecast", "text"),
    [
        (Forecast(3, [0, 2], [9, 5]), "forecast: found 1 requests; expected 2, as many as"),
        (
            Forecast(3, [0, 1, 2], [9, 5]),
            "request 0: found 1 entries; expected 2 for 6 output tokens, one for every 3",
        ),
        ([9, 5], r"requests.forecast: found \[9, 5\]; expected a Forecast"),
    ],
)
def test_an_instance_refuses_a_forecast_of_other_requests(forecast, text: str) -> None:
    # Two requests with 6 and 3 tokens, so that every 3 tokens they have 2 entries and 1.
    with pytest.raises(InputError, match=text):
        Instance([0, 1], [1, 2], [6, 3], kv_capacity=40, forecast=forecast)
    with pytest.raises(InputError, match=f"predictor '<lambda>': .*{text}"):
        predict(
            Instance([0, 1], [1, 2], [6, 3], kv_capacity=40),
            lambda _instance, _generator: {"forecast": forecast},
        )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("every", None, "forecast.every: found None; expected an integer"),
        ("offsets", [0, 1, 2], "request 0: found 1 entries"),
        (
            "remaining",
            [1, 2, "x"],
            "remaining: request . after . tokens: found 'x'; expected a number",
        ),
        ("often", 3, "often: unknown field; known here are every, offsets, remaining"),
    ],
)
def test_a_file_with_a_bad_forecast_names_the_field(instance, tmp_path, field, value, text) -> None:
    data = instance.to_dict()
    data["requests"]["forecast"][field] = value
    if field == "offsets":
        data["requests"]["forecast"]["remaining"] = [9, 5]
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=rf"bad\.json: .*{text}"):
        read_instance(file)


# --- who sees what, and when --------------------------------------------------------------------


class ByRemaining:
    """Runs what has least left, one at a time, and keeps what it is shown."""

    evict_mode = "recompute"

    def __init__(self) -> None:
        self.shown: list[tuple[list[float], list[int]]] = []

    def __deepcopy__(self, memo: dict) -> ByRemaining:
        return self  # every run is told to one object

    def batch(self, view: View) -> Batch:
        self.shown.append((view.remaining.tolist(), view.generated.tolist()))
        i = min([*view.running, *view.waiting], key=lambda k: (view.remaining[k], k))
        return Batch({i: view.rest(i)}, evict=[k for k in view.running if k != i])


def test_the_view_shows_what_is_left_now() -> None:
    # 0 runs alone (9 left, then 8); 1 arrives with 1 left and goes first, evicting 0.
    instance = Instance([0, 2], [1, 2], [6, 3], kv_capacity=40, forecast=TWO)
    policy = ByRemaining()
    simulate(instance, policy)
    # Before each batch: what is left of 0 and of 1 (-1 before it arrives), and what each has
    # produced.
    assert policy.shown == [
        ([9, -1], [0, 0]), ([8, -1], [1, 0]),
        ([7, 1], [2, 0]), ([9, 1], [0, 1]), ([9, 1], [0, 2]),  # in rounds a restart
        ([9, 1], [0, 3]), ([8, 1], [1, 3]), ([7, 1], [2, 3]),
        ([5.5, 1], [3, 3]), ([4.5, 1], [4, 3]), ([3.5, 1], [5, 3]),
    ]  # fmt: skip


def test_entries_of_the_future_and_the_truth_change_no_earlier_view() -> None:
    rng = Random(7)
    compared = 0
    for _ in range(60):
        instance = random_instance(rng, unit="round", most=6)
        every, most = rng.choice([1, 2, 3]), int(instance.output_tokens.max()) + 5
        entries = most // every + 1
        values = np.array([rng.uniform(0, 9) for _ in range(entries * instance.n)])
        offsets = np.arange(instance.n + 1) * entries
        i = rng.randrange(instance.n)
        o = instance.output_tokens.copy()
        first = rng.randint(1, max(1, int(o[i]) - 1))  # first count of tokens with another entry
        other = values.copy()
        other[i * entries + -(-first // every) : (i + 1) * entries] += 1.5
        o[i] = min(rng.randint(first + 1, most), instance.kv_capacity - instance.prompt_tokens[i])
        if o[i] <= first:
            continue
        seen = []
        for outputs, remaining in ((instance.output_tokens, values), (o, other)):
            policy = ByRemaining()
            case = Instance(
                instance.arrival, instance.prompt_tokens, outputs, kv_capacity=10**6,
                forecast=Forecast(every, offsets, remaining),
            )  # fmt: skip
            simulate(case, policy)
            seen.append(policy.shown)
        # Both runs agree until the request has produced `first` tokens, or all that it has.
        until = min(first, int(instance.output_tokens[i]))
        last = 1 + next(
            (k for k, (_, made) in enumerate(seen[0]) if made[i] >= until), len(seen[0]) - 1
        )
        assert seen[0][: last - 1] == seen[1][: last - 1]
        compared += last > 2
    assert compared > 20  # of 60 pairs a third had more than a view in common


def test_left_is_plain_arithmetic_on_the_columns() -> None:
    columns = (TWO.every, TWO.offsets, TWO.remaining)
    # After 4 tokens the total was 3 + 5.5 = 8.5, of which 2 are produced again: 6.5 are left.
    assert tokens_left(*columns, 0, 4, 2) == TWO.left(0, 4, 2) == 6.5
