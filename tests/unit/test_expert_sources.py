"""What is refused where an expert's tensors are not clear, or not those of one expert."""

import pytest
import stored_forms
import tiny_models
from mira_engine.checkpoint import expert_sources
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.errors import CheckpointError, UnsupportedModelError

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def changed(tmp_path):
    """`(family, {key: (new key, change of the tensor)}) -> folder` of a checkpoint."""

    def make(family, changes):
        folder = tiny_models.save_tiny(family, tmp_path / family)

        def change(tensors):
            made = dict(tensors)
            for key, (name, of_tensor) in changes.items():
                made[name] = of_tensor(made.pop(key))
            return made

        return stored_forms.rewrite(folder, change)

    return make


def same(tensor):
    return tensor


def renumbered(number, new):
    return {
        f"{EXPERTS}.{number}.{part}_proj.weight": (f"{EXPERTS}.{new}.{part}_proj.weight", same)
        for part in ("gate", "up", "down")
    }


def test_two_tensors_of_one_expert_are_not_clear(changed):
    folder = changed("qwen2_moe", renumbered(4, "03"))
    with pytest.raises(CheckpointError, match=rf"expert of .*{EXPERTS}\.0?3\..* is not clear"):
        CheckpointExperts(folder)


def test_number_left_out_is_missing_though_as_many_are_there(changed):
    folder = changed("qwen2_moe", renumbered(4, "8"))
    with pytest.raises(CheckpointError, match=rf"Expert 4 is missing beside {EXPERTS}\.5"):
        CheckpointExperts(folder)


@pytest.mark.parametrize("number", [2, 7])
def test_expert_of_another_shape_than_the_first_is_named(changed, number):
    key = f"{EXPERTS}.{number}.up_proj.weight"
    folder = changed("qwen2_moe", {key: (key, lambda tensor: tensor[:-1])})
    with pytest.raises(CheckpointError, match=f"differ from {EXPERTS}.0.up_proj") as caught:
        CheckpointExperts(folder)
    assert key in caught.value.message


def test_halves_of_an_expert_that_cannot_be_joined_are_named(changed):
    changes = {
        f"{EXPERTS}.{number}.up_proj.weight": (
            f"{EXPERTS}.{number}.up_proj.weight", lambda tensor: tensor[:, :-1],
        )
        for number in range(8)
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="cannot be joined") as caught:
        CheckpointExperts(changed("qwen2_moe", changes))
    assert f"{EXPERTS}.0.up_proj.weight of shape" in caught.value.message


def test_tensor_of_all_experts_with_too_few_is_named(changed):
    key = "model.layers.1.mlp.experts.down_proj"
    folder = changed("gpt_oss", {key: (key, lambda tensor: tensor[:-1])})
    with pytest.raises(CheckpointError, match=f"holds no tensor of 4 experts for {key}"):
        CheckpointExperts(folder)


def test_family_that_mixes_experts_when_it_loads_is_refused(changed, monkeypatch):
    """Stood in for by one whose conversion is no longer counted among the harmless ones."""
    folder = changed("qwen2_moe", {})
    harmless = [op for op in expert_sources._PER_EXPERT_OPS if op.__name__ != "Concatenate"]
    monkeypatch.setattr(expert_sources, "_PER_EXPERT_OPS", tuple(harmless))
    with pytest.raises(UnsupportedModelError, match="qwen2_moe mixes experts"):
        CheckpointExperts(folder)
