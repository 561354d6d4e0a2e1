"""What `config.json` says of stored weights, and where their float form may be found."""

import json

import pytest
import tiny_models
from mira_engine.checkpoint.architecture import load_config, load_quantisation
from mira_engine.checkpoint.quantisation import (
    StoredForm,
    float_repository,
    quantisation_of,
    without_quantisation,
)
from mira_engine.errors import UnsupportedModelError


def write_config(folder, quantisation, family="qwen3_moe", **fields):
    config = tiny_models.tiny_config(family)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    path = folder / "config.json"
    made = json.loads(path.read_text()) | {"quantization_config": quantisation} | fields
    path.write_text(json.dumps(made))
    return folder


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_load_config_of_a_form_that_is_read_describes_the_float_model(tmp_path, method):
    write_config(tmp_path, {"quant_method": method})
    config = load_config(tmp_path)
    assert not hasattr(config, "quantization_config")
    assert "quantization_config" not in config.to_dict()
    assert load_quantisation(tmp_path).form.is_float


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "compressed-tensors", "quark"])
def test_load_config_of_another_form_is_refused_by_name(tmp_path, method):
    write_config(tmp_path, {"quant_method": method})
    with pytest.raises(UnsupportedModelError, match=f"quantised with {method}, which") as caught:
        load_config(tmp_path)
    assert caught.value.message.count(".") == 1
    assert "float" in caught.value.hint
    assert load_config(tmp_path, is_quantised_read=True).num_experts == 8


def test_load_config_of_fp8_with_packed_fp4_is_refused_by_name(tmp_path):
    write_config(tmp_path, {"quant_method": "fp8", "expert_dtype": "fp4"})
    with pytest.raises(UnsupportedModelError, match="FP4"):
        load_config(tmp_path)


def test_load_config_of_gptq_codes_says_what_they_are_for_and_what_to_give(tmp_path):
    folder = write_config(tmp_path / "Model-A3B-GPTQ-Int4", {"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="make a draft but not the model") as caught:
        load_config(folder)
    assert "perhaps Model-A3B." in caught.value.hint


@pytest.mark.parametrize("found", [None, {}])
def test_quantisation_of_float_weights_is_none(found):
    assert quantisation_of({"quantization_config": found}) is None
    assert quantisation_of({}) is None


def test_quantisation_of_the_text_part_counts():
    fields = {"text_config": {"quantization_config": {"quant_method": "fp8"}}, "a": {"b": 1}}
    assert quantisation_of(fields).form is StoredForm.FP8
    assert without_quantisation(fields) == {"text_config": {}, "a": {"b": 1}}


@pytest.mark.parametrize("found", ["fp8", 3, ["fp8"], {"bits": 4}])
def test_quantisation_without_a_method_is_another_form(found):
    assert quantisation_of({"quantization_config": found}).form is StoredForm.OTHER


@pytest.mark.parametrize(
    ("name", "fields", "card", "expected"),
    [
        ("Qwen1.5-MoE-A2.7B-Chat-GPTQ-Int4", {}, "", "Qwen1.5-MoE-A2.7B-Chat"),
        ("models--Qwen--Big-AWQ/snapshots/0", {}, "", "Qwen/Big"),
        ("m", {"_name_or_path": "owner/Big-Instruct"}, "", "owner/Big-Instruct"),
        ("m", {"_name_or_path": "owner/Big-w4a16"}, "", "owner/Big"),
        ("m", {"_name_or_path": "/home/me/big"}, "", None),
        ("m", {"_name_or_path": "./big"}, "", None),
        ("m", {"_name_or_path": 3}, "", None),
        ("x-AWQ", {}, "---\nbase_model: owner/Big\n---\n", "owner/Big"),
        ("x-AWQ", {}, "---\nbase_model:\n- owner/Big\ntags: a\n---\n", "owner/Big"),
        ("plain", {}, "", None),
    ],
)
def test_float_repository_is_guessed_from_the_card_and_the_names(
    tmp_path, name, fields, card, expected
):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    if card:
        (folder / "README.md").write_text(card)
    assert float_repository(folder, fields) == expected
