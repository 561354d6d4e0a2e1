"""Published configurations, made small: the engine's answer is transformers' own.

As `test_exactness` does for the tiny shapes, with what publishers really chose.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from families.scaled import CONFIGS, save_scaled, scaled_down
from families.support import MAX_ERROR, Support, TakesBack, measure, prepared
from mira_engine.library import ModelLibrary

SIZES = {
    "vocab_size", "hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "experts_per_token", "max_position_embeddings",
    "original_max_position_embeddings", "sliding_window", "max_window_layers", "layer_types",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "bos_token_id",
    "eos_token_id", "pad_token_id", "rope_scaling", "rope_parameters", "quantization_config",
    "initial_context_length",
}  # fmt: skip
"""Fields that may differ from the published ones."""

ROTARY_SIZES = {"original_max_position_embeddings", "long_factor", "short_factor", "mrope_section"}

RECURRENT = {"Qwen3.5-25B-REAP-A3B-Coding"}


@pytest.fixture(scope="module")
def measured(
    shared_inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Support]:
    """Writes, prepares and measures a configuration's small form once."""
    library = ModelLibrary(tmp_path_factory.mktemp("real-configs"))
    found: dict[str, Support] = {}

    def run(name: str) -> Support:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            save_scaled(name, shared_inputs / "data" / "configs", folder)
            found[name] = measure(name, prepared(folder, library))
        return found[name]

    return run


@pytest.mark.parametrize("name", CONFIGS)
def test_scaled_down_changes_sizes_alone(name: str, shared_inputs: Path) -> None:
    path = shared_inputs / "data" / "configs" / name / "config.json"
    published = json.loads(path.read_text(encoding="utf-8"))
    small = scaled_down(published)
    changed = {field for field in published if small.get(field) != published[field]}
    assert changed <= SIZES
    assert {field for field in changed if published[field] is None} == set()
    for field in ("rope_scaling", "rope_parameters"):
        before, after = published.get(field) or {}, small.get(field) or {}
        assert before.keys() == after.keys()
        assert {k for k in before if before[k] != after[k]} <= ROTARY_SIZES
    heads, small_heads = (f["num_attention_heads"] // f["num_key_value_heads"] for f in
                          (published, small))  # fmt: skip
    assert heads == small_heads


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_text_of_a_real_shape_equal_transformers(
    name: str, measured: Callable[[str], Support]
) -> None:
    found = measured(name)
    assert found.error <= MAX_ERROR
    assert found.plain == found.text
    assert len(set(found.text)) > 2, "a constant text proves nothing"


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_do_not_change_the_text_of_a_real_shape(
    name: str, measured: Callable[[str], Support]
) -> None:
    found = measured(name)
    assert found.drafted == found.text
    if name not in RECURRENT:
        assert found.num_drafted > 0
    assert (found.num_drafted > 0) == (found.takes_back is not TakesBack.NOTHING)
