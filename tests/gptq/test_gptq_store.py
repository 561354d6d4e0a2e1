"""The store with chosen codes: written, gone on with, put in place."""

import json

import pytest
import torch
from mira_engine.checkpoint import gptq_store
from mira_engine.checkpoint.convert import checkpoint_revision, planned_manifest
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.progress import Progress
from mira_engine.checkpoint.quantised_expert import QuantisedExpert
from mira_engine.checkpoint.store import ExpertStore, StoreManifest, StoreWriter
from mira_engine.errors import CancelledError
from mira_engine.library import ModelLibrary
from mira_engine.types import Plane, Precision, Rounding


class FakeChooser:
    """Gives every matrix codes that tell the expert; refuses those in `refused`."""

    def __init__(self, group_size=32, refused=()):
        self.group_size = group_size
        self.refused = set(refused)
        self.asked = []

    def choose(self, layer, expert, tensors):
        self.asked.append((layer, expert))
        if (layer, expert) in self.refused:
            return None
        parts = {}
        for name in ("up", "down"):
            matrix = getattr(tensors, name)
            parts[f"{name}_codes"] = torch.full(matrix.shape, expert % 8, dtype=torch.int8)
            parts[f"{name}_scales"] = torch.ones(
                matrix.shape[0], matrix.shape[1] // self.group_size
            )
        return QuantisedExpert(
            group_size=self.group_size,
            up_bias=tensors.up_bias,
            down_bias=tensors.down_bias,
            **parts,
        )


@pytest.fixture
def case(tiny_checkpoint, tmp_path):
    """`(family, precision)` to a home, its checkpoint, and the planned manifests."""

    def make(family="qwen3_moe", precision=Precision.INT4):
        folder = tiny_checkpoint(family)
        home = ModelLibrary(tmp_path).resolve(str(folder))
        checkpoint = CheckpointExperts(folder)
        planned = planned_manifest(
            checkpoint, precision, source="test", revision=checkpoint_revision(checkpoint)
        )
        return home, checkpoint, planned

    return make


def write(home, checkpoint, planned, chooser, progress=None):
    folder = gptq_store.unfinished_dir(home, planned.precision)
    writer = StoreWriter(folder, gptq_store.chosen_manifest(planned, "some prompts"))
    gptq_store.write_store(checkpoint, writer, planned.precision, chooser, progress or Progress())
    return writer


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("precision", [Precision.INT4, Precision.NESTED])
def test_store_holds_the_codes_that_were_chosen(case, family, precision):
    home, checkpoint, planned = case(family, precision)
    write(home, checkpoint, planned, FakeChooser(planned.group_size))
    gptq_store.put_in_place(home, precision)
    store = ExpertStore.open(home.store_dir(precision))
    store.verify()
    for expert in range(checkpoint.num_experts):
        record = store.read_record(1, store.format.draft_plane, expert)
        draft = store.format.decode(store.format.bind_draft(record))
        codes = min(expert % 8, 7)
        assert torch.equal(draft.up, torch.full_like(draft.up, codes))
        assert torch.equal(draft.down, torch.full_like(draft.down, codes))
        wanted = checkpoint.load(1, expert)
        if wanted.up_bias is not None:
            assert torch.equal(draft.up_bias, wanted.up_bias.float())


def test_manifest_says_how_codes_were_chosen(case):
    home, checkpoint, planned = case()
    write(home, checkpoint, planned, FakeChooser())
    gptq_store.put_in_place(home, Precision.INT4)
    manifest = StoreManifest.from_file(home.store_dir(Precision.INT4) / MANIFEST_FILE)
    assert (manifest.rounding, manifest.calibration) == (Rounding.GPTQ, "some prompts")
    assert not manifest.is_same_store(planned)


def test_manifest_of_an_older_store_says_nearest(case):
    home, checkpoint, planned = case()
    write(home, checkpoint, planned, FakeChooser())
    path = gptq_store.unfinished_dir(home, Precision.INT4) / MANIFEST_FILE
    raw = json.loads(path.read_text())
    del raw["rounding"], raw["calibration"]
    path.write_text(json.dumps(raw))
    manifest = StoreManifest.from_file(path)
    assert manifest.rounding is Rounding.NEAREST
    assert manifest.is_same_store(planned)


def test_experts_without_a_choice_are_rounded_to_nearest_and_noted(case):
    home, checkpoint, planned = case()
    writer = write(home, checkpoint, planned, FakeChooser(refused=[(0, 1), (1, 0), (1, 7)]))
    assert gptq_store.read_fallbacks(writer.folder) == {"0": [1], "1": [0, 7]}
    store = ExpertStore.open(writer.folder)
    expected = store.format.encode(checkpoint.load(1, 7))[Plane.WHOLE]
    assert torch.equal(store.read_record(1, Plane.WHOLE, 7), expected)
    other = store.format.encode(checkpoint.load(1, 6))[Plane.WHOLE]
    assert not torch.equal(store.read_record(1, Plane.WHOLE, 6), other)


def test_store_stopped_in_a_layer_goes_on_behind_the_finished_ones(case):
    home, checkpoint, planned = case()
    seen = []
    progress = Progress(
        on_progress=lambda *args: seen.append(args), is_cancelled=lambda: len(seen) > 11
    )
    first = FakeChooser(refused=[(0, 3)])
    with pytest.raises(CancelledError):
        write(home, checkpoint, planned, first, progress)
    assert [args[1] for args in seen] == list(range(12))
    assert {args[0] for args in seen} == {gptq_store.STEP}
    assert {args[2:4] for args in seen} == {(16, "experts")}
    second = FakeChooser()
    writer = write(home, checkpoint, planned, second)
    assert second.asked == [(1, expert) for expert in range(8)]
    assert gptq_store.read_fallbacks(writer.folder) == {"0": [3], "1": []}
    assert writer.is_finished


def test_home_gives_the_chosen_store_only_once_it_is_whole(case):
    home, checkpoint, planned = case()
    nearest = home.nearest_store_dir(Precision.INT4)
    home.gptq_store_dir(Precision.INT4).mkdir(parents=True)  # Half deleted: without a manifest.
    assert home.store_dir(Precision.INT4) == nearest
    nearest.mkdir(parents=True)
    (nearest / MANIFEST_FILE).write_text("{}")
    write(home, checkpoint, planned, FakeChooser())
    assert home.store_dir(Precision.INT4) == nearest
    assert gptq_store.finished_manifest(home, Precision.INT4, planned) is None
    gptq_store.put_in_place(home, Precision.INT4)
    assert home.store_dir(Precision.INT4) == home.gptq_store_dir(Precision.INT4)
    assert gptq_store.finished_manifest(home, Precision.INT4, planned) is not None
    assert not nearest.exists()


@pytest.mark.parametrize(
    ("precision", "held"),
    [
        (Precision.NESTED, Precision.NESTED),
        (Precision.INT4, Precision.INT4),
        (Precision.INT8, Precision.INT4),
        (Precision.BF16, Precision.INT4),
    ],
)
def test_home_says_which_store_holds_the_draft(case, precision, held):
    assert case()[0].draft_precision(precision) is held
