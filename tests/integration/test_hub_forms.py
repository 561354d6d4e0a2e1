"""Quantised models of the hub: described before a weight is here, then brought and prepared."""

import hub_server
import huggingface_hub
import pytest
import stored_forms
import tiny_models
from huggingface_hub import constants
from mira_engine.events import DescribeModel
from mira_engine.library import ModelLibrary
from mira_engine.model_report import describe
from mira_engine.prepare import prepare
from mira_engine.types import Precision


def save_fp8(folder):
    stored_forms.save_shaped(
        "qwen3_moe", folder, hidden_size=256, moe_intermediate_size=320, num_hidden_layers=2
    )
    return stored_forms.to_fp8(folder)


def save_mxfp4(folder):
    stored_forms.save_shaped("gpt_oss", folder, hidden_size=96, intermediate_size=64)
    return stored_forms.to_mxfp4(folder)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub that the client's settings point to, with an empty cache and no token."""
    server = hub_server.FakeHub().start()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    yield server
    huggingface_hub.close_session()
    server.close()


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


def prepared_files(home):
    """Stores and the backbone's weights, by name; names of origin and their hashes left out."""
    return {
        path.relative_to(home.root).as_posix(): path.read_bytes()
        for path in sorted(home.root.rglob("*.safetensors"))
    }
