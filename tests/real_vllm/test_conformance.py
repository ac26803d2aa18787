"""The twin `vllm-v1` against vLLM's own scheduler (`make test-vllm`); skipped without vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from conformance import compare
from real_scheduler import TESTED, version
from settings import AZURE, REQUESTS, SETTINGS, Setting


def test_the_installed_vllm_is_one_that_the_twin_was_written_for() -> None:
    assert version() in TESTED, f"found vLLM {version()}; the twin is that of {', '.join(TESTED)}"


@pytest.mark.parametrize(
    "setting", SETTINGS, ids=lambda s: f"{s.requests}-{s.kv_capacity}-{s.spec}"
)
def test_every_batch_is_that_of_vllm(setting: Setting) -> None:
    if setting.requests.startswith("Azure") and not AZURE.is_file():
        pytest.skip("OPTSCHED_DATA does not name the Azure trace")
    assert setting.instance().n == REQUESTS
    found = compare(setting)
    assert found.difference == ""
    assert found.equal == found.batches > 100


def test_the_settings_reach_what_they_are_there_for() -> None:
    # A comparison where nothing is preempted or cut would say little.
    tight = compare(Setting("lognormal, 60 / s", 3_000, 16))
    assert tight.preemptions > 50
    cut = compare(
        Setting("lognormal, 60 / s", 100_000, 16, "max_num_batched_tokens=128,max_num_seqs=128")
    )
    assert cut.chunks > 50
