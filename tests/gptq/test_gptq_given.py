"""A draft with the codes of a GPTQ checkpoint of the same model."""

import io

import pytest
import stored_forms
import tiny_models
import torch
from mira_engine import wire
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.gptq_checkpoint import GptqExperts
from mira_engine.checkpoint.store import ExpertStore, StoreManifest
from mira_engine.errors import UnsupportedModelError
from mira_engine.events import PrepareDone, PrepareModel, PrepareProgress, RequestFailed
from mira_engine.gptq import take_gptq_draft
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Plane, Precision, Rounding
from mira_engine.worker import EventWriter, Worker
from mira_kernels import reference

SHAPE = {
    "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 3, "num_hidden_layers": 2,
    "head_dim": 32, "mlp_only_layers": [],
}  # fmt: skip


def ignore(*args):
    """Takes progress and drops it."""


def take(home, folder, precision=Precision.INT8):
    """Takes the codes of a folder. Returns progress reports and notices' codes."""
    seen, told = [], []
    take_gptq_draft(
        home,
        precision,
        folder,
        on_progress=lambda *args: seen.append(args),
        on_notice=lambda notice: told.append(notice.code),
    )
    return seen, told


@pytest.fixture
def model(tmp_path):
    """A float checkpoint and a GPTQ one of the same weights."""
    folders = []
    for name in ("float", "given"):
        (tmp_path / name).mkdir()
        folders.append(stored_forms.save_shaped("qwen3_moe", tmp_path / name, **SHAPE))
    tiny_models.tiny_tokenizer(folders[0])
    return folders[0], stored_forms.to_gptq(folders[1], group_size=64)


@pytest.fixture
def home(model, tmp_path):
    found = ModelLibrary(tmp_path / "data").resolve(str(model[0]))
    prepare(found, Precision.INT8, on_progress=ignore)
    return found


def test_draft_has_the_codes_that_were_given(home, model):
    seen, told = take(home, model[1])
    store = ExpertStore.open(home.store_dir(Precision.INT4))
    assert store.manifest.rounding is Rounding.GPTQ
    assert store.manifest.calibration.startswith("checkpoint ")
    given = GptqExperts(model[1])
    for layer in range(2):
        expected = store.format.encode_quantised(given.load(layer, 1))[Plane.WHOLE]
        assert torch.equal(store.read_record(layer, Plane.WHOLE, 1), expected)
    assert [args[1] for args in seen] == list(range(6))
    assert not home.nearest_store_dir(Precision.INT4).exists()
    assert told == []
    assert take(home, model[1]) == ([], [])


def test_nested_target_gets_them_as_its_high_plane_and_says_so(home, model):
    prepare(home, Precision.NESTED, on_progress=ignore)
    _, told = take(home, model[1], Precision.NESTED)
    assert told == ["gptq-target"]
    store = ExpertStore.open(home.store_dir(Precision.NESTED))
    draft = store.format.bind_draft(store.read_record(1, Plane.HI, 2))
    codes = GptqExperts(model[1]).load(1, 2).up_codes
    assert torch.equal(reference.codes(draft.up), codes.to(torch.int16).clamp(-7))


def test_checkpoint_of_another_model_is_refused(home, tmp_path):
    (tmp_path / "other").mkdir()
    fields = SHAPE | {"num_experts": 4}
    other = stored_forms.to_gptq(
        stored_forms.save_shaped("qwen3_moe", tmp_path / "other", **fields), group_size=64
    )
    with pytest.raises(UnsupportedModelError, match="other layers, experts or sizes"):
        take(home, other)
    assert home.is_ready(Precision.INT8)


def test_checkpoint_of_other_weights_is_refused(home, model):
    def doubled(tensors):
        return {k: 2 * v if k.endswith(".scales") else v for k, v in tensors.items()}

    stored_forms.rewrite(model[1], doubled)
    with pytest.raises(UnsupportedModelError, match="other weights"):
        take(home, model[1])


def test_worker_takes_the_codes_from_the_folder(home, model, tmp_path):
    def ask(folder):
        stream = io.StringIO()
        worker = Worker(ModelLibrary(tmp_path / "data"), EventWriter(stream))
        worker._run_job(
            PrepareModel(
                request_id="r", model=home.name, precision=Precision.INT8, draft_from=str(folder)
            )
        )
        return [wire.decode(line) for line in stream.getvalue().splitlines()]

    failed = ask(model[0])[-1]
    assert isinstance(failed, RequestFailed)
    assert "is float" in failed.message
    events = ask(model[1])
    assert isinstance(events[-1], PrepareDone)
    assert {e.step for e in events if isinstance(e, PrepareProgress)} == {"draft"}
    manifest = StoreManifest.from_file(home.store_dir(Precision.INT4) / MANIFEST_FILE)
    assert manifest.rounding is Rounding.GPTQ
