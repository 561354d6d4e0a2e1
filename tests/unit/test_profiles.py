"""Profiles of K on the disk: what is read back, and what is left aside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, LinkConfig
from mira_engine.events import DepthResult, KProfile
from mira_engine.profiles import ProfileKey, load_profile, save_profile
from mira_engine.profiling import FULL_SWEEP, QUICK_SWEEP, load_prompts
from mira_engine.types import ComputeDtype, Precision

KEY = ProfileKey(
    model_revision="abc", machine="a machine", budget_bytes=1000, precision=Precision.NESTED
)
PROFILE = KProfile(
    best=4,
    acceptance=0.8,
    results=(
        DepthResult(num_draft_tokens=0, tpot_s=0.02, num_replies=75),
        DepthResult(num_draft_tokens=4, tpot_s=0.0125, num_replies=74),
    ),
)


def _load(root: Path, key: ProfileKey = KEY) -> tuple[KProfile | None, list[str]]:
    notices: list[str] = []
    return load_profile(root, key, lambda code, text: notices.append(f"{code}: {text}")), notices


def test_profile_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    path = save_profile(tmp_path, KEY, PROFILE)
    assert _load(tmp_path) == (PROFILE, [])
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing unfinished is left"


@pytest.mark.parametrize(
    "change",
    [
        {"model_revision": "other"},
        {"machine": "another"},
        {"budget_bytes": 1001},
        {"precision": Precision.INT8},
    ],
)
def test_profile_of_something_else_is_not_taken(tmp_path: Path, change: dict) -> None:
    save_profile(tmp_path, KEY, PROFILE)
    assert _load(tmp_path, replace(KEY, **change)) == (None, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: None,
        lambda raw: [],
        lambda raw: raw | {"profile": {}},
        lambda raw: raw | {"profile": raw["profile"] | {"best": 5}},
        lambda raw: raw | {"profile": raw["profile"] | {"acceptance": float("nan")}},
        lambda raw: raw | {"profile": raw["profile"] | {"results": "none"}},
        lambda raw: raw | {"version": 99},
        lambda raw: raw | {"key": raw["key"] | {"machine": "copied from elsewhere"}},
    ],
)
def test_damaged_or_foreign_file_is_left_aside_and_said(tmp_path: Path, damage) -> None:
    path = save_profile(tmp_path, KEY, PROFILE)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))), encoding="utf-8")
    profile, notices = _load(tmp_path)
    assert profile is None
    assert len(notices) == 1
    assert notices[0].startswith("profile-unusable: ")


def test_half_a_file_is_left_aside_and_said(tmp_path: Path) -> None:
    path = save_profile(tmp_path, KEY, PROFILE)
    path.write_bytes(path.read_bytes()[:40])
    profile, notices = _load(tmp_path)
    assert (profile, len(notices)) == (None, 1)


def test_key_tells_arithmetic_and_emulated_links_apart() -> None:
    configs = (
        EngineConfig(),
        EngineConfig(dtype=ComputeDtype.FLOAT32),
        EngineConfig(link=LinkConfig(bytes_per_s=5e8)),
        EngineConfig(link=LinkConfig(bytes_per_s=5e8, latency_s=0.001)),
    )
    keys = [
        ProfileKey.of_engine(config, machine="m", model_revision="r", budget_bytes=1)
        for config in configs
    ]
    assert len({key.file_name for key in keys}) == len(keys)


def test_expected_accepted_is_a_over_one_minus_a() -> None:
    assert PROFILE.expected_accepted == pytest.approx(4.0)
    assert replace(PROFILE, acceptance=0.9663).expected_accepted == pytest.approx(28.7, abs=0.05)
    assert replace(PROFILE, acceptance=1.0).expected_accepted == float("inf")


def test_shipped_prompts_are_25_of_five_kinds_and_5_for_a_quick_run() -> None:
    full, quick = (load_prompts(sweep.num_prompts_per_kind) for sweep in (FULL_SWEEP, QUICK_SWEEP))
    assert (len(set(full)), len(quick)) == (25, 5)
    assert set(quick) <= set(full)
    assert sum("def " in prompt for prompt in quick) == 1
