"""Quantised models of the hub: described before a weight is here, then brought and prepared."""

import json

import pytest
import stored_forms
import tiny_models
from mira_engine.checkpoint.outline import OUTLINE_FILE
from mira_engine.checkpoint.shards import INDEX_FILE
from mira_engine.errors import CheckpointError
from mira_engine.events import DescribeModel
from mira_engine.library import ModelLibrary
from mira_engine.model_report import describe
from mira_engine.prepare import prepare
from mira_engine.types import Precision
from safetensors.torch import load_file, save_file


def save_fp8(folder):
    stored_forms.save_shaped(
        "qwen3_moe", folder, hidden_size=256, moe_intermediate_size=320, num_hidden_layers=2
    )
    return stored_forms.to_fp8(folder)


def save_mxfp4(folder):
    stored_forms.save_shaped("gpt_oss", folder, hidden_size=96, intermediate_size=64)
    return stored_forms.to_mxfp4(folder)


@pytest.fixture
def server(empty_hub):
    return empty_hub


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
def test_quantised_repository_is_described_and_prepared_like_its_folder(tmp_path, server, save):
    folder = save(tmp_path / "published")
    tiny_models.tiny_tokenizer(folder)
    server.add("owner/quantised", folder)
    library = ModelLibrary(tmp_path / "data")
    home = library.resolve("owner/quantised")
    made = describe(home, DescribeModel(request_id="r", model="owner/quantised"))
    assert (made.refusal, made.notes) == ("", ())
    sizes = {size.precision: size for size in made.sizes}
    by_folder = ModelLibrary(tmp_path / "other").resolve(str(folder))
    for each in (home, by_folder):
        prepare(each, Precision.NESTED, on_progress=lambda *args: None)
    found, expected = (prepared_files(each) for each in (home, by_folder))
    assert found == expected
    num_bytes = sum(len(data) for data in found.values())
    assert sizes[Precision.NESTED].prepared_bytes == pytest.approx(num_bytes, rel=0.03)


def split_scales(folder):
    """Puts all scales into a second file."""
    tensors = load_file(folder / stored_forms.WEIGHTS)
    (folder / stored_forms.WEIGHTS).unlink()
    parts = ({}, {})
    for key, tensor in tensors.items():
        parts[key.endswith("_scale_inv")][key] = tensor
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_scales_in_other_files_forbid_deletion_and_the_next_run_does_not_go_on_with_it(
    tmp_path, server
):
    folder = split_scales(save_fp8(tmp_path / "published"))
    tiny_models.tiny_tokenizer(folder)
    server.add("owner/split", folder)
    home = ModelLibrary(tmp_path / "data").resolve("owner/split")

    def run(**options):
        prepare(home, Precision.NESTED, on_progress=lambda *args: None, **options)

    for _ in range(2):
        with pytest.raises(CheckpointError, match="scales are in other files") as caught:
            run(is_download_deleted=True)
        assert "keep it" in caught.value.hint
        assert not (home.root / OUTLINE_FILE).exists()
    run()
    assert home.is_ready(Precision.NESTED)


def prepared_files(home):
    """Stores and the backbone's weights, by name; names of origin and their hashes left out."""
    return {
        path.relative_to(home.root).as_posix(): path.read_bytes()
        for path in sorted(home.root.rglob("*.safetensors"))
    }
