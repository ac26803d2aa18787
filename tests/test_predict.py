"""Predictors: what they tell, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from optsched import run
from optsched.policies import make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.predict import estimates, predict, predictors


@pytest.fixture
def instance() -> Instance:
    """Return three requests whose outputs are 1, 10 and 7 tokens."""
    return Instance([0, 0, 1], [1, 2, 3], [1, 10, 7], kv_capacity=40)


def test_the_oracle_tells_the_truth(instance: Instance) -> None:
    """Outputs of `instance` are 1, 10 and 7."""
    assert predict(instance, "oracle").predicted.tolist() == [1, 10, 7]


def test_one_interval_for_all(instance: Instance) -> None:
    told = predict(instance, "interval:low=1,high=12")
    assert told.predicted_lower.tolist() == [1, 1, 1]
    assert told.predicted_upper.tolist() == [12, 12, 12]
    assert told.predicted is None


def test_classes_of_width_5(instance: Instance) -> None:
    # 1 lies in [1, 5], 10 in [6, 10] and 7 in [6, 10].
    told = predict(instance, "classes:width=5")
    assert told.predicted_lower.tolist() == [1, 6, 6]
    assert told.predicted_upper.tolist() == [5, 10, 10]


@pytest.mark.parametrize(
    ("x", "lower", "upper"),
    [
        ("0.1", [1, 9, 6], [2, 11, 8]),  # 0.9, 9 and 6.3 down; 1.1, 11 and 7.7 up
        ("0", [1, 10, 7], [1, 10, 7]),
        ("0.99", [1, 1, 1], [2, 20, 14]),  # 0.1 down to 0, and at least 1; 19.9 up
    ],
)
def test_relative_intervals(instance: Instance, x: str, lower: list, upper: list) -> None:
    told = predict(instance, f"relative:x={x}")
    assert told.predicted_lower.tolist() == lower
    assert told.predicted_upper.tolist() == upper


@pytest.mark.parametrize(("mae", "bias"), [(20, 0), (0.3, 0), (30, 10), (15, -12), (100, 0)])
def test_noisy_points_have_the_error_and_bias_asked_for(mae: float, bias: float) -> None:
    outputs = generate("lognormal", n=1000).output_tokens
    many = Instance(
        np.zeros(20_000), np.ones(20_000, int), np.tile(outputs, 20), kv_capacity=16_000
    )
    told = predict(many, f"noisy:mae={mae},bias={bias}", seed=1)
    error = told.predicted - many.output_tokens
    # Means of 20,000 errors, within five standard errors.
    spread = np.abs(error).std() / np.sqrt(many.n)
    assert np.abs(error).mean() == pytest.approx(mae, abs=5 * spread)
    assert error.mean() == pytest.approx(bias, abs=5 * error.std() / np.sqrt(many.n) + 1e-9)
    assert (told.predicted >= 1).all()
    assert (told.predicted == np.rint(told.predicted)).all()


def test_noise_of_none_is_the_truth(instance: Instance) -> None:
    """Outputs of `instance` are 1, 10 and 7."""
    assert predict(instance, "noisy:mae=0").predicted.tolist() == [1, 10, 7]


def test_the_seed_decides(instance: Instance) -> None:
    one, two, other = (predict(instance, "noisy:mae=3", seed=k).predicted for k in (1, 1, 2))
    assert one.tolist() == two.tolist() != other.tolist()


@pytest.mark.parametrize(
    "answer",
    [
        lambda instance, rng: [2, 9, 7],
        lambda instance, rng: np.array([2, 9, 7]),
        lambda instance, rng: {"predicted": (2, 9, 7)},
    ],
)
def test_a_users_function_tells_points(instance: Instance, answer) -> None:
    assert predict(instance, answer).predicted.tolist() == [2, 9, 7]


def test_a_users_function_tells_intervals(instance: Instance) -> None:
    told = predict(instance, lambda i, _: (i.output_tokens - 0, i.output_tokens + 2))
    # Outputs are 1, 10 and 7.
    assert told.predicted_upper.tolist() == [3, 12, 9]


def test_a_users_column(instance: Instance) -> None:
    assert predict(instance, [3, 4, 5]).predicted.tolist() == [3, 4, 5]


def test_a_users_file(instance: Instance, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def half(instance, generator):\n    return (instance.output_tokens + 1) // 2\n"
    )
    # Half of 1, 10 and 7, rounded up.
    assert predict(instance, f"{file}:half").predicted.tolist() == [1, 5, 4]
    spec = f"mc-sf:predictor={file}:half"
    assert make_policy(spec)[1].predictor == f"{file}:half"
    run(instance, spec)


def test_columns_of_a_csv_file(instance: Instance, tmp_path: Path) -> None:
    # Columns of an interval, then of a point, then of neither, and no file.
    file = tmp_path / "p.csv"
    file.write_text("id,predicted_lower,predicted_upper\na,1,2\nb,3,30\nc,7,7\n")
    told = predict(instance, f"column:file={file}")
    assert told.predicted_lower.tolist() == [1, 3, 7]
    file.write_text("predicted\n1\nx\n2\n")
    with pytest.raises(InputError, match=r"request 1.*'x'"):
        predict(instance, f"column:file={file}")
    file.write_text("guess\n1\n")
    with pytest.raises(InputError, match="no column of predictions; expected predicted,"):
        predict(instance, f"column:file={file}")
    with pytest.raises(InputError, match="no such file; expected a table"):
        predict(instance, "column:file=nowhere.csv")


def test_predicting_again_forgets_the_old_predictions(instance: Instance) -> None:
    told = predict(predict(instance, "classes:width=5"), "oracle")
    assert told.predicted_lower is None


def _raises(instance, rng):
    raise ValueError("no model")


@pytest.mark.parametrize(
    ("predictor", "text"),
    [
        (lambda i, _: [1.0, float("nan"), 3.0], "request 1: found nan; expected a finite number"),
        (lambda i, _: [1, 2], "predicted: found 2 values; expected 3, as many as arrival has"),
        (lambda i, _: [1, None, 3], "request 1: found None; expected a number"),
        (lambda i, _: [1, 0, 3], "request 1: found 0; expected a number from 1.0 to 2147483647"),
        (
            lambda i, _: ([1, 9, 8], [3, 12, 7]),
            "request 2: .* and output_tokens 7; expected lower <= upper",
        ),
        (
            lambda i, _: ([1, 11, 7], [3, 12, 7]),
            "and output_tokens 10; expected lower <= output_tokens",
        ),
        (
            lambda i, _: ([1, 1, 1], [3, 9, 7]),
            "and output_tokens 10; expected output_tokens <= upper",
        ),
        (
            lambda i, _: {"predicted_lower": [1, 1, 1]},
            "predicted_upper: found nothing; expected both ends of",
        ),
        (lambda i, _: {"guess": [1, 1, 1]}, "column 'guess' is unknown"),
        (lambda i, _: "many", "expected a list of numbers"),
        (lambda i, _: None, "predictor '<lambda>': found no predictions; expected one per request"),
        (lambda i, _: {"predicted": None}, "found no predictions"),
        (_raises, r"predictor '_raises': raised ValueError\('no model'\)"),
        ("nothing", "predictor 'nothing' is unknown; known are .*classes.*oracle"),
        ("interval:high=5", "request 1: .* and output_tokens 10; expected output_tokens <= upper"),
        ("interval:low=5,high=4", "1 <= low <= high"),
        ("classes:width=0", "width: found 0; expected an integer >= 1"),
        ("classes:size=3", "parameter 'size' is unknown; known are width"),
        ("relative:x=1.5", "x: found 1.5; expected 0 <= x <= 1"),
        ("relative:x=nan", "x: found 'nan'; expected a number"),
        ("noisy:mae=1,bias=2", "at least the size of the bias"),
        ("noisy:mae=500", "mae below"),
        ("missing.py:f", "missing.py: no such file; expected file.py:name"),
        ("column", "parameter 'file': found nothing; expected a value"),
    ],
)
def test_what_cannot_be_a_prediction_is_named(instance: Instance, predictor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        predict(instance, predictor)


def test_every_predictor_has_a_summary() -> None:
    assert {"oracle", "interval", "classes", "relative", "noisy", "column"} <= set(predictors())
    assert all(info.summary for info in predictors().values())


# --- estimates, and predictors of policies ------------------------------------------------------


def test_estimates_fall_back_to_what_there_is(instance: Instance) -> None:
    points, intervals = predict(instance, [2, 3, 4]), predict(instance, "classes:width=5")
    # By (lengths, margin): where the instance alone, one with points, and one with intervals look.
    expected = {
        ("predicted", 0): ("oracle", "predicted", "predicted_upper"),
        ("lower", 0): ("oracle", "predicted", "predicted_lower"),
        ("upper", 0): ("oracle", "predicted", "predicted_upper"),
        # Hindsight looks through intervals, but not through points.
        ("hindsight", 0): ("oracle", "predicted", "oracle"),
    }
    for (lengths, margin), sources in expected.items():
        found = [estimates(i, lengths, margin)[1] for i in (instance, points, intervals)]
        assert tuple(found) == sources


def test_estimates_with_a_margin_never_exceed_what_fits(instance: Instance) -> None:
    # M = 40: prompts 1, 2 and 3 leave 39, 38 and 37.
    assert estimates(instance, margin=30)[0].tolist() == [31, 38, 37]


def test_a_policys_predictor_replaces_the_instances(instance: Instance) -> None:
    """The instance says 30, 1 and 1; with a predictor of its own that tells true lengths, mc-sf
    does what it does without predictions."""
    told = predict(instance, [30, 1, 1])
    plain = simulate(instance, "mc-sf")
    again = simulate(told, "mc-sf:predictor=oracle")
    np.testing.assert_array_equal(plain.request, again.request)
    assert again.instance_sha256 == told.sha256
    assert make_policy("mc-sf:predictor=oracle")[1].clairvoyant
    assert not make_policy("mc-sf:predictor=noisy,predictor.mae=2")[1].clairvoyant


def test_simulate_takes_a_predictor(instance: Instance) -> None:
    """In the policy's text, as a word of its own, and told to the instance before: the same
    schedule."""
    by_spec = simulate(instance, "mc-sf:predictor=classes,predictor.width=5")
    by_word = simulate(instance, "mc-sf", predictor="classes:width=5")
    by_file = simulate(predict(instance, "classes:width=5"), "mc-sf")
    np.testing.assert_array_equal(by_spec.request, by_word.request)
    np.testing.assert_array_equal(by_spec.request, by_file.request)
    assert by_spec.instance_sha256 == by_word.instance_sha256 == instance.sha256


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("mc-sf:predictor=nothing", "policy .*predictor 'nothing' is unknown"),
        ("mc-sf:predictor.mae=2", "expected predictor=NAME"),
        ("mc-sf:predictor=noisy,predictor.x=2", "parameter 'x' is unknown; known are mae, bias"),
        ("mc-sf:margin=-1", "margin: found -1"),
    ],
)
def test_a_bad_predictor_of_a_policy_is_named(spec: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_policy(spec)


def test_predict_on_the_command_line(tmp_path: Path) -> None:
    source, out = tmp_path / "i.json", tmp_path / "o.json"
    source.write_text(
        json.dumps(
            {
                "format": "optsched-instance", "version": 1, "name": "x", "time_unit": "round",
                "kv_capacity": 40, "kv_accounting": "generated",
                "requests": {"arrival": [0], "prompt_tokens": [1], "output_tokens": [7]},
            }
        )
    )  # fmt: skip
    line = [sys.executable, "-m", "optsched", "export", str(source), "-o", str(out), "--predictor"]
    done = subprocess.run(
        [*line, "classes:width=5"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # 7 tokens are in the class of 6 to 10.
    assert json.loads(out.read_text())["requests"]["predicted_lower"] == [6]
    bad = subprocess.run(
        [*line, "interval:high=5"],  # 7 tokens are above 5
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bad.returncode == 2
    assert "request 0" in bad.stderr
