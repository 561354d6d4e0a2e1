"""The store with chosen codes: written, gone on with, put in place."""

import json
import pathlib
import shutil

import pytest
import torch
from chosen_codes import FakeChooser, write_chosen
from mira_engine.checkpoint import gptq_store
from mira_engine.checkpoint.convert import checkpoint_revision, planned_manifest
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.progress import Progress
from mira_engine.checkpoint.store import ExpertStore, StoreManifest
from mira_engine.errors import CancelledError, PrepareError
from mira_engine.library import ModelLibrary
from mira_engine.types import Plane, Precision, Rounding


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


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("precision", [Precision.INT4, Precision.NESTED])
def test_store_holds_the_codes_that_were_chosen(case, family, precision):
    home, checkpoint, planned = case(family, precision)
    write_chosen(home, checkpoint, planned, FakeChooser(planned.group_size))
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
    write_chosen(home, checkpoint, planned, FakeChooser())
    gptq_store.put_in_place(home, Precision.INT4)
    manifest = StoreManifest.from_file(home.store_dir(Precision.INT4) / MANIFEST_FILE)
    assert (manifest.rounding, manifest.calibration) == (Rounding.GPTQ, "some prompts")
    assert not manifest.is_same_store(planned)


def test_manifest_of_an_older_store_says_nearest(case):
    home, checkpoint, planned = case()
    write_chosen(home, checkpoint, planned, FakeChooser())
    path = gptq_store.unfinished_dir(home, Precision.INT4) / MANIFEST_FILE
    raw = json.loads(path.read_text())
    del raw["rounding"], raw["calibration"]
    path.write_text(json.dumps(raw))
    manifest = StoreManifest.from_file(path)
    assert manifest.rounding is Rounding.NEAREST
    assert manifest.is_same_store(planned)


def test_experts_without_a_choice_are_rounded_to_nearest_and_noted(case):
    home, checkpoint, planned = case()
    writer = write_chosen(home, checkpoint, planned, FakeChooser(refused=[(0, 1), (1, 0), (1, 7)]))
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
        write_chosen(home, checkpoint, planned, first, progress)
    assert [args[1] for args in seen] == list(range(12))
    assert {args[0] for args in seen} == {gptq_store.STEP}
    assert {args[2:4] for args in seen} == {(16, "experts")}
    second = FakeChooser()
    writer = write_chosen(home, checkpoint, planned, second)
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
    write_chosen(home, checkpoint, planned, FakeChooser())
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


# -- put in place -------------------------------------------------------------------------


def test_unfinished_store_is_not_put_in_place(case):
    home, checkpoint, planned = case()
    nearest = home.nearest_store_dir(Precision.INT4)
    nearest.mkdir(parents=True)
    (nearest / MANIFEST_FILE).write_text("{}")
    seen = []
    progress = Progress(
        on_progress=lambda *args: seen.append(args), is_cancelled=lambda: len(seen) > 11
    )
    with pytest.raises(CancelledError):
        write_chosen(home, checkpoint, planned, FakeChooser(), progress)
    with pytest.raises(PrepareError, match="is no finished store"):
        gptq_store.put_in_place(home, Precision.INT4)
    assert home.is_store_finished(Precision.INT4)
    assert home.store_dir(Precision.INT4) == nearest
    assert not home.gptq_store_dir(Precision.INT4).exists()


class Killed(BaseException):
    """The process ends here."""


NUM_STEPS = 4
"""Renaming the old store, renaming the new one, deleting the old one's manifest and its files."""


@pytest.fixture
def kill_at(monkeypatch):
    """Ends the process before its n-th change of a name, an unlinking or a whole folder."""

    def plant(number):
        steps = []

        def counted(original):
            def run(*args, **kwargs):
                steps.append(original.__name__)
                if len(steps) == number:
                    raise Killed
                return original(*args, **kwargs)

            return run

        monkeypatch.setattr(pathlib.Path, "rename", counted(pathlib.Path.rename))
        monkeypatch.setattr(pathlib.Path, "unlink", counted(pathlib.Path.unlink))
        monkeypatch.setattr(gptq_store.shutil, "rmtree", counted(shutil.rmtree))
        return steps

    return plant


def whole_stores(home):
    """Calibrations of the finished INT4 stores that are on the disk, by their folder's name."""
    found = {}
    for path in (home.root / "stores").glob(f"*/{MANIFEST_FILE}"):
        manifest = StoreManifest.from_file(path)
        if gptq_store._has_all_files(path.parent, manifest):
            found[path.parent.name] = manifest.calibration
    return found


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 2))
def test_store_in_use_is_whole_until_the_next_one_has_its_name(case, monkeypatch, kill_at, step):
    home, checkpoint, planned = case()
    for calibration in ("old", "new"):
        write_chosen(home, checkpoint, planned, FakeChooser(), calibration=calibration)
        if calibration == "old":
            gptq_store.put_in_place(home, Precision.INT4)
    steps = kill_at(step)
    if step > NUM_STEPS:
        gptq_store.put_in_place(home, Precision.INT4)
        assert steps == ["rename", "rename", "unlink", "rmtree"]
    else:
        with pytest.raises(Killed):
            gptq_store.put_in_place(home, Precision.INT4)
    name = home.gptq_store_dir(Precision.INT4).name
    found = whole_stores(home)
    assert "new" in found.values()
    assert found.get(name) == "new" or "old" in found.values()
    monkeypatch.undo()
    if found.get(name) != "new":
        gptq_store.put_in_place(home, Precision.INT4)
        assert whole_stores(home) == {name: "new"}
    assert StoreManifest.from_file(home.store_dir(Precision.INT4) / MANIFEST_FILE).calibration == (
        "new"
    )
