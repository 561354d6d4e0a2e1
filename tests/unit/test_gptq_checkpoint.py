"""Experts of GPTQ checkpoints: the codes as they are, into INT4 records, and what is refused."""

import json
import re

import pytest
import stored_forms
import tiny_models
import torch
from mira_engine.checkpoint.formats import make_format
from mira_engine.checkpoint.gptq_checkpoint import GptqExperts
from mira_engine.checkpoint.quantise import quantise_int4
from mira_engine.errors import CheckpointError, UnsupportedModelError
from mira_engine.types import Precision
from safetensors.torch import load_file

SHAPES = {
    "whole groups": {"hidden_size": 256, "moe_intermediate_size": 128},
    "a last group cut off": {"hidden_size": 256, "moe_intermediate_size": 320},
}


def save_float(folder, **fields):
    shape = {"num_experts": 3, "num_hidden_layers": 2, "head_dim": 64, "mlp_only_layers": []}
    return stored_forms.save_shaped("qwen3_moe", folder, **shape | fields)


def codes_of(folder, group_size, layer, expert):
    """Codes and float16 scales of both matrices, as the test's own packing chose them."""
    tensors = load_file(folder / stored_forms.WEIGHTS)
    name = f"model.layers.{layer}.mlp.experts.{expert}"
    pairs = [
        stored_forms.gptq_codes(tensors[f"{name}.{part}_proj.weight"], group_size)
        for part in ("gate", "up", "down")
    ]
    up = [torch.cat((gate, up)) for gate, up in zip(pairs[0], pairs[1], strict=True)]
    return up, list(pairs[2])


def by_input(scales, group_size, num_inputs):
    group = num_inputs if group_size == -1 else group_size
    return scales.float()[:, torch.arange(num_inputs) // group]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [128, 64, -1])
def test_load_gives_the_codes_and_scales_that_are_stored(tmp_path, shape, group_size):
    folder = save_float(tmp_path, **SHAPES[shape])
    expected = [
        codes_of(folder, group_size, layer, expert) for layer in (0, 1) for expert in range(3)
    ]
    experts = GptqExperts(stored_forms.to_gptq(folder, group_size=group_size))
    assert (len(experts.modules), experts.num_experts) == (2, 3)
    assert all(
        size % experts.group_size == 0
        for size in (experts.shape.hidden_size, experts.shape.intermediate_size)
    )
    for number, (up, down) in enumerate(expected):
        found = experts.load(*divmod(number, 3))
        values = experts.load_float(*divmod(number, 3))
        assert found.group_size == experts.group_size
        assert found.up_bias is None
        for name, (codes, scales) in (("up", up), ("down", down)):
            assert torch.equal(getattr(found, f"{name}_codes"), codes)
            spread = by_input(scales, group_size, codes.shape[1])
            kept = getattr(found, f"{name}_scales")
            assert kept.dtype == torch.float32
            assert torch.equal(kept.repeat_interleave(found.group_size, 1), spread)
            assert torch.equal(getattr(values, name), codes * spread)


def test_load_keeps_the_group_of_the_checkpoint_where_it_divides_both_inputs(tmp_path):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]))
    assert GptqExperts(folder).group_size == 128


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_record_of_a_loaded_expert_holds_its_codes_exactly(tmp_path, shape):
    experts = GptqExperts(stored_forms.to_gptq(save_float(tmp_path, **SHAPES[shape])))
    form = make_format(Precision.INT4, experts.shape)
    found, values = experts.load(1, 2), experts.load_float(1, 2)
    decoded = form.decode(form.bind(form.encode_quantised(found)))
    for name in ("up", "down"):
        codes, scales = getattr(found, f"{name}_codes"), getattr(found, f"{name}_scales")
        rounded = scales.bfloat16().float().repeat_interleave(experts.group_size, 1)
        assert torch.equal(getattr(decoded, name), codes * rounded)
        error = (getattr(decoded, name) - getattr(values, name)).abs()
        assert bool((error <= getattr(values, name).abs() * 2**-8).all())


def test_load_of_the_second_version_takes_its_own_zero_point(tmp_path):
    folder = save_float(tmp_path, **SHAPES["whole groups"])
    up, _ = codes_of(folder, 128, 0, 0)
    stored_forms.to_gptq(folder, zero=8, checkpoint_format="gptq_v2")
    assert torch.equal(GptqExperts(folder).load(0, 0).up_codes, up[0])


def test_load_without_zero_points_and_order_takes_the_usual_ones(tmp_path):
    folder = save_float(tmp_path, **SHAPES["whole groups"])
    up, _ = codes_of(folder, 128, 0, 0)
    stored_forms.to_gptq(folder)
    ends = (".qzeros", ".g_idx")
    stored_forms.rewrite(
        folder, lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(ends)}
    )
    assert torch.equal(GptqExperts(folder).load(0, 0).up_codes, up[0])


def test_load_of_a_family_with_names_of_its_own_uses_its_mapping(tmp_path):
    folder = stored_forms.save_shaped(
        "mixtral", tmp_path, hidden_size=128, intermediate_size=64, num_hidden_layers=1
    )
    weight = load_file(folder / stored_forms.WEIGHTS)[
        "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    ]
    found = GptqExperts(stored_forms.to_gptq(folder, group_size=32)).load(0, 2)
    assert torch.equal(found.down_codes, stored_forms.gptq_codes(weight, 32)[0])


def test_load_outside_the_layer_is_an_index_error(tmp_path):
    experts = GptqExperts(stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"])))
    for expert in (-1, 3):
        with pytest.raises(IndexError):
            experts.load(0, expert)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 8}, "8 bits, and only 4"),
        ({"bits": 3}, "3 bits"),
        ({"sym": False}, "only symmetric"),
        ({"checkpoint_format": "marlin"}, "order of marlin"),
        ({"quant_method": "awq"}, "quantised with awq, and a draft"),
    ],
)
def test_configuration_whose_codes_have_no_form_here_is_refused(tmp_path, fields, words):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]), **fields)
    assert_refused(folder, words)


def assert_refused(folder, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        GptqExperts(folder)
    assert caught.value.hint
    assert len(re.findall(r"\.(?:\s|$)", caught.value.message)) == 1


def test_float_checkpoint_is_no_source_of_codes(tmp_path):
    assert_refused(save_float(tmp_path, **SHAPES["whole groups"]), "is float, and a draft")


def change_tensors(folder, end, change):
    stored_forms.rewrite(
        folder,
        lambda tensors: {k: change(v) if k.endswith(end) else v for k, v in tensors.items()},
    )


def test_inputs_in_another_order_are_refused(tmp_path):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]), desc_act=True)
    assert GptqExperts(folder).load(0, 0).group_size == 128  # In name only: the order is plain.
    change_tensors(folder, ".g_idx", lambda order: order.flip(0))
    assert_refused(folder, "desc_act")


@pytest.mark.parametrize("end", ["experts.0.gate_proj.qzeros", "experts.0.down_proj.qzeros"])
def test_zero_points_that_differ_are_refused(tmp_path, end):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]))
    change_tensors(folder, end, lambda zeros: zeros + 1)
    assert_refused(folder, "only symmetric codes")


def test_zero_points_of_a_later_expert_are_refused_when_it_is_read(tmp_path):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]))
    change_tensors(folder, "layers.1.mlp.experts.2.up_proj.qzeros", lambda zeros: zeros + 1)
    experts = GptqExperts(folder)
    experts.load(1, 1)
    with pytest.raises(UnsupportedModelError, match=r"experts\.2\.up_proj"):
        experts.load(1, 2)


def test_group_that_no_int4_group_fits_is_refused(tmp_path):
    folder = save_float(tmp_path, hidden_size=256, moe_intermediate_size=320)
    stored_forms.to_gptq(folder, group_size=48)
    assert_refused(folder, "groups of 48")


def test_family_with_biased_or_transposed_experts_is_refused(tmp_path):
    config = tiny_models.tiny_config("gpt_oss")
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    stored_forms.set_quantisation(tmp_path, stored_forms.GPTQ_FIELDS)
    assert_refused(tmp_path, "gpt_oss are biased or transposed")


@pytest.mark.parametrize("group_size", [0, -2, "128"])
def test_group_size_that_is_none_is_named(tmp_path, group_size):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]))
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["group_size"] = group_size
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="group_size"):
        GptqExperts(folder)


@pytest.mark.parametrize(
    ("end", "change", "words"),
    [
        (".scales", lambda scales: scales[:1], r"gate_proj\.scales of shape \(1, 128\)"),
        (".scales", lambda scales: scales * float("nan"), "nan or infinity in the scales"),
        (".qweight", lambda words: words[:-1], "qweight|of shape"),
        ("down_proj.qweight", lambda words: words[:, :-8], "down_proj"),
        (".qzeros", lambda zeros: zeros.float(), r"qzeros of torch\.float32"),
    ],
)
def test_tensor_that_is_damaged_is_named_with_its_file(tmp_path, end, change, words):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]))
    change_tensors(folder, end, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        GptqExperts(folder)
    assert stored_forms.WEIGHTS in caught.value.message


def test_scales_that_are_missing_are_named(tmp_path):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]))
    stored_forms.rewrite(
        folder, lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(".scales")}
    )
    with pytest.raises(CheckpointError, match=r"no tensor .*gate_proj\.scales"):
        GptqExperts(folder)


def test_expert_that_is_missing_is_named(tmp_path):
    folder = stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"]))
    stored_forms.rewrite(
        folder, lambda tensors: {k: v for k, v in tensors.items() if ".1.mlp.experts.2" not in k}
    )
    with pytest.raises(CheckpointError, match="Expert 2 is missing|2 experts for"):
        GptqExperts(folder)


def test_codes_of_the_checkpoint_are_not_rounded_anew(tmp_path):
    """Rounding the values again would choose other codes: what the codes are kept for."""
    experts = GptqExperts(stored_forms.to_gptq(save_float(tmp_path, **SHAPES["whole groups"])))
    anew = quantise_int4(experts.load_float(0, 0).up, experts.group_size)
    assert not torch.equal(anew.codes.to(torch.int8), experts.load(0, 0).up_codes)
