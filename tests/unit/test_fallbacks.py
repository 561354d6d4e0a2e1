"""Each fallback that shows while replies are made is told by its code, and no other one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mira_engine.config import EngineConfig
from mira_engine.fallbacks import round_fallbacks, unusable_predictors
from mira_engine.runtime.telemetry import ReplyMeter


def _executor(
    *, is_direct: bool = True, num_on_host: int = 0, prefetch: str = "", predictions: str = ""
) -> SimpleNamespace:
    meter = ReplyMeter()
    meter.decode.num_on_host = num_on_host
    return SimpleNamespace(
        transfer=SimpleNamespace(is_direct=is_direct),
        meter=meter,
        driver=SimpleNamespace(
            payoff=SimpleNamespace(is_on=not prefetch, reason=prefetch),
            prediction_payoff=SimpleNamespace(is_on=not predictions, reason=predictions),
        ),
    )


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        ({"is_direct": False}, "no-direct-io", "O_DIRECT"),
        ({"num_on_host": 3}, "host-experts", "--deterministic"),
        ({"prefetch": "It costs more."}, "prefetch-off", "It costs more."),
        ({"predictions": "They miss."}, "predictions-off", "predictor heads: They miss."),
    ],
)
def test_fallback_that_shows_is_told(changes: dict[str, object], code: str, part: str) -> None:
    (notice,) = round_fallbacks(EngineConfig(), _executor(**changes), None)
    assert notice.code == code
    assert part in notice.text


def test_moved_memory_of_a_card_is_told_in_its_own_words() -> None:
    spill = SimpleNamespace(text="It was moved.")
    (notice,) = round_fallbacks(EngineConfig(), _executor(), spill)
    assert (notice.code, notice.text) == ("spilled-memory", "It was moved.")


def test_all_well_is_no_notice() -> None:
    assert not list(round_fallbacks(EngineConfig(), _executor(), None))


def test_cached_reads_that_were_asked_for_are_no_fallback() -> None:
    config = EngineConfig(is_direct_io=False)
    assert not list(round_fallbacks(config, _executor(is_direct=False), None))


def test_predictors_that_cannot_be_used_name_the_way_to_get_them() -> None:
    damaged = unusable_predictors("m", is_made=True, is_begun=True)
    begun = unusable_predictors("m", is_made=False, is_begun=True)
    assert "damaged" in damaged
    assert "not trained yet" in begun
    assert all("mira-chat prepare m" in reason for reason in (damaged, begun))
    assert unusable_predictors("m", is_made=False, is_begun=False) is None
