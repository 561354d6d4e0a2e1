"""The option that leaves all experts to the card, and what is said of those on the processor."""

from __future__ import annotations

from mira_app.figures import derived, stats_line
from mira_app.options import CHAT_SETTINGS, LOAD_SETTINGS
from mira_app.panel_history import PanelState
from mira_app.settings import load_settings
from mira_app.tui.widgets.live_panel import COLUMN_WIDTH
from mira_app.tui.widgets.panels.sections import served_by
from mira_engine import api
from mira_engine.api import EngineConfig, LoadModel, ReplyStats

STATS = ReplyStats(num_new_tokens=9, num_hits=70, num_misses=30, num_on_host=12, host_s=0.5)


def test_deterministic_comes_from_flag_environment_and_file() -> None:
    assert not load_settings({}, {}).engine.is_deterministic
    assert load_settings({"deterministic": True}, {}).engine.is_deterministic
    environ = {"MIRA_CHAT_DETERMINISTIC": "yes"}
    assert load_settings({}, environ).engine.is_deterministic
    assert not load_settings({"deterministic": False}, environ).engine.is_deterministic
    assert load_settings({}, {}, {"deterministic": True}).engine.is_deterministic


def test_deterministic_can_be_given_wherever_a_model_is_loaded() -> None:
    assert "deterministic" in CHAT_SETTINGS
    assert "deterministic" in LOAD_SETTINGS


def test_deterministic_and_figures_reach_the_engine_and_come_back() -> None:
    asked = LoadModel(request_id="r", model="m", config=EngineConfig(is_deterministic=True))
    assert api.decode(api.encode(asked)) == asked
    told = api.StatsSample(request_id="r", stats=STATS)
    assert api.decode(api.encode(told)) == told


def test_line_of_a_reply_tells_the_processors_share_where_there_is_one() -> None:
    assert "hits 70.0%, 12.0% on the processor |" in stats_line(STATS, budget_bytes=1)
    assert derived(STATS)["host_share"] == 0.12
    assert "processor" not in stats_line(ReplyStats(num_hits=7, num_misses=3), budget_bytes=1)
    assert derived(ReplyStats())["host_share"] == 0.0


def test_panel_tells_what_the_processor_computed_where_it_did() -> None:
    def lines(stats: ReplyStats) -> list[str]:
        return [str(line) for line in served_by(PanelState(stats=stats), COLUMN_WIDTH)]

    (told,) = [line for line in lines(STATS) if "processor" in line]
    assert told.split() == ["by", "the", "processor", "12"]
    assert not any("processor" in line for line in lines(ReplyStats(num_hits=7, num_misses=3)))
    many = ReplyStats(num_hits=1, num_misses=2_000_000_000, num_on_host=1_999_999_999)
    assert all(len(line) <= COLUMN_WIDTH for line in lines(many))
