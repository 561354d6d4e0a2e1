"""Defaults, environment, flags, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from mira_app.paths import cache_dir, data_dir, log_dir
from mira_app.settings import load_settings
from mira_engine.api import (
    CompileMode,
    ComputeDtype,
    ConfigError,
    DraftDense,
    MemoryAmount,
    Precision,
)


def test_defaults_leave_the_engine_its_own():
    settings = load_settings({"k": None, "budget": None}, {})
    assert settings.model == "builtin"
    assert not settings.is_model_given
    assert settings.engine.budget is None
    assert settings.engine.num_draft_tokens is None


def test_flags_win_over_environment_and_environment_over_defaults():
    environ = {"MIRA_CHAT_BUDGET": "40%", "MIRA_CHAT_K": "2", "MIRA_CHAT_PRECISION": "int8"}
    settings = load_settings({"k": 8, "dtype": "float32"}, environ)
    assert settings.engine.budget == MemoryAmount(share=0.4)
    assert settings.engine.num_draft_tokens == 8
    assert settings.engine.precision is Precision.INT8
    assert settings.engine.dtype is ComputeDtype.FLOAT32


def test_compiling_and_the_drafts_layers_are_chosen_by_name():
    settings = load_settings({}, {})
    assert settings.engine.compile_mode is CompileMode.AUTO
    assert settings.engine.draft_dense is DraftDense.AUTO
    environ = {"MIRA_CHAT_COMPILE": "WAIT", "MIRA_CHAT_DRAFT_DENSE": "int8"}
    settings = load_settings({}, environ)
    assert settings.engine.compile_mode is CompileMode.WAIT
    assert settings.engine.draft_dense is DraftDense.INT8
    settings = load_settings({"compile": "off", "draft_dense": "split"}, environ)
    assert settings.engine.compile_mode is CompileMode.OFF
    assert settings.engine.draft_dense is DraftDense.SPLIT


def test_largest_seed_is_taken():
    assert load_settings({"seed": 2**63 - 1}, {}).sampling.seed == 2**63 - 1


def test_link_and_sampling_values_are_converted():
    settings = load_settings(
        {"link_rate": "500MB/s", "link_latency": 2.0, "seed": 7, "prefetch": False, "system": ""},
        {},
    )
    assert settings.engine.link.bytes_per_s == 500e6
    assert settings.engine.link.latency_s == pytest.approx(0.002)
    assert settings.sampling.seed == 7
    assert not settings.engine.is_prefetch_enabled
    assert settings.system_prompt == ""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("precision", "int3", "nested"),
        ("dtype", "fp16", "bfloat16"),
        ("budget", "lots", "300MiB"),
        ("budget", "0%", "budget"),
        ("k", "many", "whole number"),
        ("k", 33, "0 to 32"),
        ("k", -1, "0 to 32"),
        ("temperature", "nan", "0 to 10"),
        ("link_rate", "40%", "link-rate"),
        ("link_rate", "fast", "link-rate"),
        ("link_latency", -1, "latency"),
        ("prefetch", "maybe", "yes or no"),
        ("compile", "later", "off, auto, wait"),
        ("draft_dense", "int4", "auto, target, split, int8"),
        ("draft_experts", "some", "auto, all, cached"),
        ("max_tokens", 0, "at least 1"),
        ("colour", "red", "colour"),
        ("seed", -1, "0 to 9223372036854775807"),
        ("seed", 2**63, "0 to 9223372036854775807"),
        ("seed", "many", "whole number"),
    ],
)
def test_values_that_cannot_be_used_are_refused_with_what_can(name, value, said):
    with pytest.raises(ConfigError) as caught:
        load_settings({name: value}, {})
    assert said in str(caught.value)


def test_data_dir_variable_moves_data_and_logs(tmp_path):
    environ = {"MIRA_CHAT_DATA_DIR": str(tmp_path)}
    assert data_dir(environ) == tmp_path
    assert log_dir(environ) == tmp_path / "logs"
    assert cache_dir(environ) == tmp_path / "cache"
    assert data_dir({}).name == "mira-chat"
    assert "mira-chat" in cache_dir({}).parts
    assert cache_dir({}) not in (data_dir({}), log_dir({}))
    assert isinstance(log_dir({}), Path)


def test_memory_is_bytes_and_never_a_share():
    assert load_settings({"memory": "1.5GiB"}, {}).engine.memory_bytes == 3 * 2**29
    assert load_settings({}, {"MIRA_CHAT_MEMORY": "8GB"}).engine.memory_bytes == 8 * 10**9
    assert load_settings({}, {}).engine.memory_bytes is None
    for text in ("40%", "lots", "0MiB"):
        with pytest.raises(ConfigError, match="memory"):
            load_settings({"memory": text}, {})
