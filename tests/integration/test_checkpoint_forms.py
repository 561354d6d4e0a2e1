"""Checkpoints run as they come: FP8, MXFP4, float16, float32, mixed, oddly named or tied.

Oracle: transformers' own dequantising loader where it has one for the form, and the same
checkpoint with its values written out in bfloat16 where it has not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stored_forms
import tiny_models
import torch
from mira_engine.checkpoint import shards as shards_module
from mira_engine.checkpoint.experts import CheckpointExperts, map_keys
from mira_engine.checkpoint.store import ExpertStore
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import CheckpointError
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import ComputeDtype, Phase, Precision
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.quantizers import quantizer_finegrained_fp8

WHOLE_BLOCKS = {
    "hidden_size": 256,
    "moe_intermediate_size": 384,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "head_dim": 64,
}
"""Of a qwen3_moe whose every FP8 matrix is made of whole blocks."""

CUT_BLOCKS = {
    "hidden_size": 256,
    "moe_intermediate_size": 320,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_head_dim": 80,
}
"""Of a deepseek_v3 with matrices of 320 and 192 rows: the last block of 128 is cut off."""

FUSED = {"hidden_size": 256, "intermediate_size": 192, "num_local_experts": 4}
"""Of a granitemoe, whose checkpoints hold all experts of a layer in one tensor."""

MXFP4 = {"hidden_size": 96, "intermediate_size": 64}
PROMPT = [5, 90, 17, 33, 250, 8, 61, 7, 7, 120]


@pytest.fixture
def home_of(tmp_path: Path) -> Callable[[Path], ModelHome]:
    library = ModelLibrary(tmp_path / "data")

    def find(folder: Path) -> ModelHome:
        return library.resolve(str(folder))

    return find


@pytest.fixture
def load(home_of: Callable[[Path], ModelHome]) -> Iterator[Callable[..., Engine]]:
    """Prepares a checkpoint and loads it; closes all engines at the end."""
    engines: list[Engine] = []

    def make(folder: Path, precision: Precision, dtype: ComputeDtype) -> Engine:
        home = home_of(folder)
        prepare(home, precision, on_progress=lambda *_: None, is_cancelled=lambda: False)
        config = EngineConfig(
            precision=precision,
            dtype=dtype,
            budget=MemoryAmount(share=8.0),
            num_draft_tokens=0,
            context_length=64,
            num_threads=1,
        )
        engines.append(Engine.load(home, config, on_notice=lambda notice: None))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@torch.inference_mode()
def assert_logits_equal(engine: Engine, folder: Path) -> None:
    """The engine's logits in float32 are transformers' own on a float checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    actual = engine.passes.forward(PROMPT, Phase.PREFILL, num_logits=len(PROMPT))
    assert expected.std() > 0.01, "equal logits of nothing prove nothing"
    assert (actual - expected).abs().max() / expected.abs().max() <= 1e-5


def assert_experts_equal(checkpoint: CheckpointExperts, model: torch.nn.Module) -> None:
    """Every expert is, bit for bit in float32, the loaded model's."""
    modules = dict(model.named_modules())
    for module in checkpoint.modules:
        loaded = modules[module.name]
        for expert in range(module.num_experts):
            got = checkpoint.load(module.layer, expert)
            pairs = [(got.up, loaded.gate_up_proj), (got.down, loaded.down_proj)]
            for tensor, params in pairs:
                wanted = params[expert].t() if loaded.is_transposed else params[expert]
                assert torch.equal(tensor.float(), wanted.float())
                assert tensor.is_contiguous()
            if loaded.has_bias:
                assert torch.equal(got.up_bias.float(), loaded.gate_up_proj_bias[expert].float())
                assert torch.equal(got.down_bias.float(), loaded.down_proj_bias[expert].float())


def assert_backbone_equal(checkpoint: CheckpointExperts, model: torch.nn.Module) -> None:
    """Every other weight is, bit for bit, the loaded model's."""
    state = model.state_dict()
    assert len(checkpoint.backbone_keys) > 10
    for key, target, _ in map_keys(model, checkpoint.backbone_keys):
        assert torch.equal(checkpoint.shards.read(key), state[target])


# -- FP8 -----------------------------------------------------------------------------------


def test_fp8_whole_blocks_equal_transformers_own_dequantising_loader(tmp_path, monkeypatch):
    # transformers asks for accelerate before it dequantises, and does without it afterwards.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    folder = stored_forms.to_fp8(
        stored_forms.save_shaped("qwen3_moe", tmp_path / "m", **WHOLE_BLOCKS)
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    checkpoint = CheckpointExperts(folder)
    assert checkpoint.dtype == torch.bfloat16
    assert_experts_equal(checkpoint, model)
    assert_backbone_equal(checkpoint, model)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen3_moe", WHOLE_BLOCKS), ("deepseek_v3", CUT_BLOCKS), ("granitemoe", FUSED)],
)
def test_fp8_model_runs_as_its_values_written_out(tmp_path, load, family, fields):
    folder = stored_forms.to_fp8(stored_forms.save_shaped(family, tmp_path / "m", **fields))
    written_out = stored_forms.fp8_to_float(Path(shutil.copytree(folder, tmp_path / "float")))
    model = AutoModelForCausalLM.from_pretrained(written_out, dtype=torch.bfloat16)
    checkpoint = CheckpointExperts(folder)
    assert_experts_equal(checkpoint, model)
    assert_backbone_equal(checkpoint, model)
    assert_logits_equal(load(folder, Precision.FLOAT32, ComputeDtype.FLOAT32), written_out)


def test_fp8_backbone_is_float_and_says_nothing_of_quantisation(tmp_path, load):
    folder = stored_forms.to_fp8(
        stored_forms.save_shaped("deepseek_v3", tmp_path / "m", **CUT_BLOCKS)
    )
    engine = load(folder, Precision.NESTED, ComputeDtype.BFLOAT16)
    backbone = engine.home.backbone_dir
    config = json.loads((backbone / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["model_type"] == "deepseek_v3"
    tensors = load_file(backbone / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not [key for key in tensors if key.endswith("_scale_inv")]
    reply = engine.reply(PROMPT, SamplingConfig(max_new_tokens=4))
    assert sum(isinstance(step, int) for step in reply) == 4


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_fp8_with_one_scale_a_matrix_is_read(tmp_path, suffix):
    folder = stored_forms.save_shaped("qwen3_moe", tmp_path / "m", **WHOLE_BLOCKS)
    before = CheckpointExperts(folder).load(0, 2).down
    stored_forms.to_fp8(folder, suffix=suffix, block=None)
    values, scale = (
        load_file(folder / stored_forms.WEIGHTS)[f"model.layers.1.mlp.experts.2.down_proj.{end}"]
        for end in ("weight", f"weight{suffix}")
    )
    after = CheckpointExperts(folder).load(0, 2).down
    assert torch.equal(after, (values.float() * scale).to(torch.bfloat16))
    assert (after - before).norm() < 0.05 * before.norm()


def test_one_fp8_expert_reads_its_own_bytes_only(tmp_path, monkeypatch):
    folder = stored_forms.to_fp8(
        stored_forms.save_shaped("deepseek_v3", tmp_path / "m", **CUT_BLOCKS)
    )
    checkpoint = CheckpointExperts(folder)
    lengths, original = [], shards_module.read_bytes

    def counted(path, offset, num_bytes):
        lengths.append(num_bytes)
        return original(path, offset, num_bytes)

    monkeypatch.setattr(shards_module, "read_bytes", counted)
    checkpoint.load(0, 3)
    num_scales = 3 * 3 * 2  # Three matrices of 320 by 256, or the other way round.
    assert sum(lengths) == checkpoint.shape.num_weights + 4 * num_scales


def edit(folder: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    stored_forms.rewrite(folder, lambda tensors: tensors | {key: change(tensors[key])})


@pytest.mark.parametrize(
    "key",
    ["model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"],
)
@pytest.mark.parametrize(
    ("end", "change"),
    [
        ("_scale_inv", lambda scales: scales[:-1]),
        ("_scale_inv", lambda scales: scales.t()),
        ("", lambda values: values[:100]),
    ],
)
def test_fp8_tensors_that_do_not_fit_are_refused_when_the_checkpoint_is_opened(
    tmp_path, key, end, change
):
    folder = stored_forms.save_shaped("deepseek_v3", tmp_path / "m", **CUT_BLOCKS)
    stored_forms.to_fp8(folder)
    edit(folder, key + end, change)
    with pytest.raises(CheckpointError) as caught:
        CheckpointExperts(folder)
    assert key in caught.value.message
    assert stored_forms.WEIGHTS in caught.value.message


# -- MXFP4 ---------------------------------------------------------------------------------


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    folder = stored_forms.save_shaped("gpt_oss", tmp_path / "m", **MXFP4)
    return stored_forms.to_mxfp4(folder)


def test_mxfp4_equals_transformers_own_dequantising_loader(mxfp4):
    model = AutoModelForCausalLM.from_pretrained(
        mxfp4, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    checkpoint = CheckpointExperts(mxfp4)
    assert_experts_equal(checkpoint, model)
    assert_backbone_equal(checkpoint, model)


def test_mxfp4_model_runs_as_its_values_written_out(mxfp4, tmp_path, load):
    written_out = stored_forms.mxfp4_to_float(Path(shutil.copytree(mxfp4, tmp_path / "float")))
    engine = load(mxfp4, Precision.FLOAT32, ComputeDtype.FLOAT32)
    assert_logits_equal(engine, written_out)
    config = json.loads((engine.home.backbone_dir / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("end", ["_blocks", "_scales"])
def test_mxfp4_tensors_cut_short_are_named(mxfp4, end):
    key = "model.layers.1.mlp.experts.down_proj"
    edit(mxfp4, key + end, lambda tensor: tensor[:, :-1])
    with pytest.raises(CheckpointError, match="do not fit each other") as caught:
        CheckpointExperts(mxfp4)
    assert f"{stored_forms.WEIGHTS} holds {key}_blocks" in caught.value.message


def test_mxfp4_blocks_and_scales_both_cut_short_are_named_with_what_is_needed(mxfp4):
    key = "model.layers.1.mlp.experts.down_proj"
    for end in ("_blocks", "_scales"):
        edit(mxfp4, key + end, lambda tensor: tensor[:, :, :-1])
    with pytest.raises(CheckpointError, match=r"give \(32, 96\), not \(64, 96\)") as caught:
        CheckpointExperts(mxfp4)
    assert key in caught.value.message
    assert stored_forms.WEIGHTS in caught.value.message


# -- Float types ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_types_are_read_exactly_and_run_in_bfloat16(tmp_path, load, dtype):
    folder = tiny_models.save_tiny("qwen2_moe", tmp_path / "m", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoint = CheckpointExperts(folder)
    assert checkpoint.dtype == dtype
    assert_experts_equal(checkpoint, model)
    assert_logits_equal(load(folder, Precision.FLOAT32, ComputeDtype.FLOAT32), folder)
    engine = load(folder, Precision.NESTED, ComputeDtype.BFLOAT16)
    logits = engine.passes.forward(PROMPT, Phase.PREFILL, num_logits=len(PROMPT))
    assert logits.dtype == torch.bfloat16
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("precision", list(Precision))
def test_largest_float16_values_overflow_in_no_store(tmp_path, home_of, precision):
    folder = tiny_models.save_tiny("qwen2_moe", tmp_path / "m", dtype=torch.float16)
    key = "model.layers.1.mlp.experts.3.down_proj.weight"
    edit(folder, key, lambda tensor: torch.full_like(tensor, 65504.0))
    home = home_of(folder)
    prepare(home, precision, on_progress=lambda *_: None)
    store = ExpertStore.open(home.store_dir(precision))
    records = {plane: store.read_record(1, plane, 3) for plane in store.format.planes}
    decoded = store.format.decode(store.format.bind(records)).down
    assert bool((decoded - 65504).abs().max() <= 65504 / 128)


def test_mixed_float_types_run_as_in_transformers(tmp_path, load):
    folder = tiny_models.save_tiny("qwen3_moe", tmp_path / "m")
    types = (torch.float32, torch.bfloat16, torch.float16)

    def mix(tensors):
        return {key: t.to(types[number % 3]) for number, (key, t) in enumerate(tensors.items())}

    stored_forms.rewrite(folder, mix)
    checkpoint = CheckpointExperts(folder)
    assert {checkpoint.shards[key].dtype for key in checkpoint.shards} == set(types)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_experts_equal(checkpoint, model)
    assert_logits_equal(load(folder, Precision.FLOAT32, ComputeDtype.FLOAT32), folder)


# -- What belongs to the model -------------------------------------------------------------


def test_weights_under_another_name_without_an_index_are_used(tmp_path, tiny_checkpoint):
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "m"))
    expected = CheckpointExperts(folder)
    expected_up = expected.load(1, 3).up
    tensors = load_file(folder / stored_forms.WEIGHTS)
    (folder / stored_forms.WEIGHTS).unlink()
    experts = {key: tensor for key, tensor in tensors.items() if ".experts." in key}
    rest = {key: tensor for key, tensor in tensors.items() if key not in experts}
    save_file(experts, folder / "experts-fp32.safetensors")
    save_file(rest, folder / "consolidated.safetensors")
    found = CheckpointExperts(folder)
    assert sorted(found.backbone_keys) == sorted(expected.backbone_keys)
    assert torch.equal(found.load(1, 3).up, expected_up)
    (folder / "consolidated.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no tensor for lm_head.weight and"):
        CheckpointExperts(folder)


def test_index_older_than_its_files_is_read_by_their_headers(tmp_path):
    folder = tiny_models.save_tiny("qwen3_moe", tmp_path / "m", max_shard_size="100KB")
    expected = CheckpointExperts(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    kept = {name: key for key, name in index["weight_map"].items()}
    index["weight_map"] = {kept[name]: names[number - 1] for number, name in enumerate(names)}
    path.write_text(json.dumps(index))
    found = CheckpointExperts(folder)
    assert sorted(found.backbone_keys) == sorted(expected.backbone_keys)
    assert torch.equal(found.load(1, 5).down, expected.load(1, 5).down)


@pytest.mark.parametrize(
    "key",
    [
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
        "mtp.fc.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "vision_tower.encoder.layers.0.weight",
        "audio_tower.layers.0.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ],
)
def test_tensors_beside_the_text_model_are_left_out(tmp_path, key):
    folder = tiny_models.save_tiny("glm4_moe", tmp_path / "m")
    before = CheckpointExperts(folder)
    expected = before.load(0, 0).up
    stored_forms.rewrite(folder, lambda tensors: tensors | {key: torch.ones(2, 2)})
    after = CheckpointExperts(folder)
    assert key in after.shards
    assert sorted(after.backbone_keys) == sorted(before.backbone_keys)
    assert torch.equal(after.load(0, 0).up, expected)


def test_output_layer_missing_from_an_untied_checkpoint_is_named(tmp_path):
    folder = tiny_models.save_tiny("qwen3_moe", tmp_path / "m")
    stored_forms.rewrite(
        folder, lambda tensors: {k: t for k, t in tensors.items() if k != "lm_head.weight"}
    )
    with pytest.raises(CheckpointError, match=r"no tensor for lm_head\.weight\."):
        CheckpointExperts(folder)


@pytest.mark.parametrize("is_same", [True, False])
def test_output_layer_shipped_with_a_tied_model_is_kept_only_where_it_differs(
    tmp_path, load, is_same
):
    folder = tiny_models.save_tiny("ernie4_5_moe", tmp_path / "m")

    def ship(tensors):
        head = tensors["model.embed_tokens.weight"]
        return tensors | {"lm_head.weight": head if is_same else head.flip(0)}

    stored_forms.rewrite(folder, ship)
    engine = load(folder, Precision.FLOAT32, ComputeDtype.FLOAT32)
    kept = load_file(engine.home.backbone_dir / stored_forms.WEIGHTS)
    assert ("lm_head.weight" in kept) is not is_same
    assert_logits_equal(engine, folder)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.down_proj.weight"),
        ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.weight"),
    ],
)
def test_expert_matrix_of_another_shape_is_named_with_its_file(tmp_path, family, key):
    folder = tiny_models.save_tiny(family, tmp_path / "m")
    edit(folder, key, lambda tensor: tensor[..., :-1])
    with pytest.raises(CheckpointError) as caught:
        CheckpointExperts(folder)
    assert key in caught.value.message
    assert stored_forms.WEIGHTS in caught.value.message


def test_other_weight_of_another_shape_is_refused_when_the_checkpoint_is_opened(tmp_path):
    folder = tiny_models.save_tiny("qwen3_moe", tmp_path / "m")
    key = "model.layers.0.self_attn.o_proj.weight"
    edit(folder, key, lambda tensor: tensor[:-1])
    with pytest.raises(CheckpointError, match=r"o_proj\.weight of shape \(63, 64\)") as caught:
        CheckpointExperts(folder)
    assert stored_forms.WEIGHTS in caught.value.message
