"""Preparation of tiny models: what is made, and that nothing finished is ever lost."""

import errno
import hashlib
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from mira_engine import prepare as prepare_module
from mira_engine.checkpoint import backbone as backbone_module
from mira_engine.checkpoint import store as store_module
from mira_engine.checkpoint import writing
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.store import ExpertStore
from mira_engine.errors import (
    CancelledError,
    CheckpointError,
    DiskSpaceError,
    ModelBusyError,
    PrepareError,
)
from mira_engine.library import ModelLibrary
from mira_engine.prepare import locked, prepare
from mira_engine.types import Precision
from safetensors.torch import load_file

CHILD = Path(__file__).parent / "prepare_child.py"
FAMILY = "qwen3_moe"


def ignore(*args):
    """Takes progress and drops it."""


@pytest.fixture
def home_of(tmp_path):
    def find(folder, data="data"):
        return ModelLibrary(tmp_path / data).resolve(str(folder))

    return find


def hashes(home):
    """SHA-256 of everything made for a model but its lock, by relative name."""
    return {
        path.relative_to(home.root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def stamps(home):
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in home.root.rglob("*.safetensors")
    }


@pytest.mark.parametrize("family", tiny_models.FORMS)
def test_float32_store_holds_every_expert_exactly(family, tiny_checkpoint, home_of):
    folder = tiny_checkpoint(family)
    home = home_of(folder)
    prepare(home, Precision.FLOAT32, on_progress=ignore)
    assert home.is_ready(Precision.FLOAT32)
    checkpoint, store = (
        CheckpointExperts(folder),
        ExpertStore.open(home.store_dir(Precision("float32"))),
    )
    assert store.manifest.num_layers == len(checkpoint.modules)
    for module in checkpoint.modules:
        for expert in range(module.num_experts):
            records = {
                plane: store.read_record(module.layer, plane, expert)
                for plane in store.format.planes
            }
            got = store.format.decode(store.format.bind(records))
            wanted = checkpoint.load(module.layer, expert)
            assert torch.equal(got.up, wanted.up)
            assert torch.equal(got.down, wanted.down)
            if wanted.up_bias is not None:
                assert torch.equal(got.up_bias, wanted.up_bias)
                assert torch.equal(got.down_bias, wanted.down_bias)


def test_bf16_store_of_a_bf16_checkpoint_is_exact_and_of_a_float32_one_rounds(
    tiny_checkpoint, home_of
):
    for dtype in (torch.bfloat16, torch.float32):
        folder = tiny_checkpoint(FAMILY, dtype=dtype)
        home = home_of(folder)
        prepare(home, Precision.BF16, on_progress=ignore)
        store, checkpoint = (
            ExpertStore.open(home.store_dir(Precision("bf16"))),
            CheckpointExperts(folder),
        )
        assert checkpoint.dtype == dtype
        (plane,) = store.format.planes
        got = store.format.decode(store.format.bind({plane: store.read_record(1, plane, 2)}))
        wanted = checkpoint.load(1, 2).up
        assert torch.equal(got.up.bfloat16(), wanted.bfloat16())
        assert torch.equal(got.up, wanted.float()) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("family", tiny_models.FORMS)
def test_backbone_has_the_checkpoints_own_tensors_and_files(family, tiny_checkpoint, home_of):
    folder = tiny_checkpoint(family, tokenizer=True)
    home = home_of(folder)
    prepare(home, Precision.NESTED, on_progress=ignore)

    checkpoint, kept = CheckpointExperts(folder), load_file(home.backbone_dir / "model.safetensors")
    assert sorted(kept) == sorted(checkpoint.backbone_keys)
    assert all(torch.equal(kept[key], checkpoint.shards.read(key)) for key in kept)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (home.backbone_dir / name).read_bytes() == (folder / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home.backbone_dir)
    assert tokenizer.chat_template


@pytest.mark.parametrize(
    ("precision", "made"),
    [
        (Precision.NESTED, {"nested"}),
        (Precision.INT4, {"int4"}),
        (Precision.INT8, {"int8", "int4"}),
        (Precision.BF16, {"bf16", "int4"}),
    ],
)
def test_prepare_makes_the_stores_that_the_precision_needs(
    precision, made, tiny_checkpoint, home_of
):
    home = home_of(tiny_checkpoint(FAMILY))
    prepare(home, precision, on_progress=ignore)
    assert {path.name for path in (home.root / "stores").iterdir()} == made
    assert precision in home.ready_precisions
    for name in made:
        ExpertStore.open(home.store_dir(Precision(name))).verify()


def test_prepare_again_writes_nothing_and_reports_nothing(tiny_checkpoint, home_of):
    home = home_of(tiny_checkpoint(FAMILY))
    prepare(home, Precision.NESTED, on_progress=ignore)
    before, seen = stamps(home), []
    prepare(home, Precision.NESTED, on_progress=lambda *args: seen.append(args))
    assert stamps(home) == before
    assert seen == []


def test_progress_counts_up_to_its_total_in_every_step(tiny_checkpoint, home_of):
    seen = []
    prepare(
        home_of(tiny_checkpoint(FAMILY)),
        Precision.NESTED,
        on_progress=lambda *args: seen.append(args),
    )
    assert list(dict.fromkeys(step for step, *_ in seen)) == ["backbone", "convert"]
    for wanted in ("backbone", "convert"):
        counts = [(done, total) for step, done, total, *_ in seen if step == wanted]
        assert counts == sorted(counts)
        assert len({total for _, total in counts}) == 1
        assert all(done <= total for done, total in counts)


def test_two_runs_give_the_same_bytes(tiny_checkpoint, home_of):
    homes = [home_of(tiny_checkpoint(FAMILY), data=name) for name in ("one", "two")]
    for home in homes:
        prepare(home, Precision.INT8, on_progress=ignore)
    assert hashes(homes[0]) == hashes(homes[1])


# -- stopped on the way -------------------------------------------------------------------


def start_child(data_dir, folder, stop_at, *limit):
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(data_dir), str(folder), "nested", str(stop_at), *limit],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def kill_case(tmp_path_factory):
    """A checkpoint, the hashes of its whole preparation, and the lines that it tells."""
    base = tmp_path_factory.mktemp("kill")
    folder = tiny_models.save_tiny("qwen3_moe", base / "model")
    home = ModelLibrary(base / "whole").resolve(str(folder))
    lines = []
    prepare(home, Precision.NESTED, on_progress=lambda *args: lines.append(args))
    return folder, hashes(home), lines


@pytest.mark.parametrize("where", ["backbone", "first", "within", "between", "last"])
def test_killed_and_run_again_ends_with_the_same_bytes(kill_case, tmp_path, where):
    folder, whole, lines = kill_case
    first = next(number for number, line in enumerate(lines) if line[0] == "convert")
    num_experts = 8
    stop_at = {
        "backbone": 2,
        "first": first,
        "within": first + 3,
        "between": first + num_experts,
        "last": len(lines) - 1,
    }[where]
    with start_child(tmp_path, folder, stop_at) as child:
        told = [child.stdout.readline() for _ in range(stop_at + 1)]
        assert told[-1].split()[0] == ("backbone" if where == "backbone" else "convert")
        child.kill()
        assert child.wait() < 0
    home = ModelLibrary(tmp_path).resolve(str(folder))
    assert not home.is_ready(Precision.NESTED)
    finished = {path: stamp for path, stamp in stamps(home).items() if path.parent.name == "nested"}
    assert len(finished) == {"between": 2, "last": 2}.get(where, 0)
    seen = []
    prepare(home, Precision.NESTED, on_progress=lambda *args: seen.append(args))
    assert hashes(home) == whole
    after = stamps(home)
    assert all(after[path] == stamp for path, stamp in finished.items())
    num_layers = 2
    expected = (num_layers - len(finished) // 2) * num_experts
    assert sum(step == "convert" for step, *_ in seen) == expected


def test_full_disk_by_file_size_limit_is_named_and_goes_on(kill_case, tmp_path):
    folder, whole, _ = kill_case
    with start_child(tmp_path, folder, -1, str(60_000)) as child:
        last = child.stdout.readlines()[-1]
        assert child.wait() == 1
    assert last.startswith("DiskSpaceError")
    assert "kept" in last
    home = ModelLibrary(tmp_path).resolve(str(folder))
    assert not home.is_ready(Precision.NESTED)
    prepare(home, Precision.NESTED, on_progress=ignore)
    assert hashes(home) == whole


def test_full_disk_in_the_second_layer_keeps_the_first(kill_case, tmp_path, monkeypatch):
    folder, whole, _ = kill_case
    home = ModelLibrary(tmp_path).resolve(str(folder))

    class FakeFullWriter(writing.TensorFileWriter):
        def append(self, tensor):
            if "layer-0001.lo" in self.path.name:
                with writing.disk_errors(self.path):
                    raise OSError(errno.ENOSPC, "No space left on device")
            super().append(tensor)

    monkeypatch.setattr(store_module, "TensorFileWriter", FakeFullWriter)
    with pytest.raises(DiskSpaceError, match=r"layer-0001\.lo") as caught:
        prepare(home, Precision.NESTED, on_progress=ignore)
    assert "kept" in caught.value.hint
    kept = stamps(home)
    assert {path.name for path in home.store_dir(Precision.NESTED).glob("layer-*")} == {
        "layer-0000.hi.safetensors",
        "layer-0000.lo.safetensors",
    }
    monkeypatch.undo()
    prepare(home, Precision.NESTED, on_progress=ignore)
    assert hashes(home) == whole
    assert {path: stamp for path, stamp in stamps(home).items() if path in kept} == kept


def test_no_room_is_said_before_anything_is_written(tiny_checkpoint, home_of, monkeypatch):
    home = home_of(tiny_checkpoint(FAMILY))
    monkeypatch.setattr(writing, "free_bytes", lambda path: 1000)
    seen = []
    with pytest.raises(DiskSpaceError, match="1000 bytes") as caught:
        prepare(home, Precision.NESTED, on_progress=lambda *args: seen.append(args))
    assert "MiB more" in caught.value.hint
    assert seen == []
    assert hashes(home) == {}


@pytest.mark.parametrize("after", [0, 5, 20])
def test_cancelled_and_run_again_ends_with_the_same_bytes(kill_case, tmp_path, after):
    folder, whole, _ = kill_case
    home = ModelLibrary(tmp_path).resolve(str(folder))
    asked = []

    def is_cancelled():
        asked.append(1)
        return len(asked) > after

    with pytest.raises(CancelledError):
        prepare(home, Precision.NESTED, on_progress=ignore, is_cancelled=is_cancelled)
    assert len(asked) == after + 1
    assert list(home.root.rglob("*.partial")) == []
    prepare(home, Precision.NESTED, on_progress=ignore)
    assert hashes(home) == whole


def test_two_processes_do_not_prepare_one_model_at_once(kill_case, tmp_path):
    folder, _, _ = kill_case
    home = ModelLibrary(tmp_path).resolve(str(folder))
    with start_child(tmp_path, folder, 0) as child:
        child.stdout.readline()
        with pytest.raises(PrepareError, match="another process"):
            prepare(home, Precision.NESTED, on_progress=ignore)
        out, _ = child.communicate("")
        assert out.splitlines()[-1] == "done"
    assert home.is_ready(Precision.NESTED)


# -- what changes under a prepared model --------------------------------------------------


def test_other_weights_in_the_same_folder_are_converted_anew(tmp_path, home_of):
    folder = tiny_models.save_tiny(FAMILY, tmp_path / "model", seed=0)
    home = home_of(folder)
    prepare(home, Precision.NESTED, on_progress=ignore)
    before = hashes(home)
    tiny_models.save_tiny(FAMILY, folder, seed=1)
    prepare(home, Precision.NESTED, on_progress=ignore)
    after = hashes(home)
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before if name.startswith("stores"))
    assert before["backbone/model.safetensors"] != after["backbone/model.safetensors"]


def test_other_chat_template_remakes_the_backbone_and_no_store(tmp_path, home_of):
    folder = tiny_models.save_tiny(FAMILY, tmp_path / "model")
    tiny_models.tiny_tokenizer(folder)
    home = home_of(folder)
    prepare(home, Precision.NESTED, on_progress=ignore)
    stores = {p: s for p, s in stamps(home).items() if p.parent.name == "nested"}
    (folder / "chat_template.jinja").write_text("{{ 'other' }}")
    prepare(home, Precision.NESTED, on_progress=ignore)
    assert (home.backbone_dir / "chat_template.jinja").read_text() == "{{ 'other' }}"
    assert {p: s for p, s in stamps(home).items() if p.parent.name == "nested"} == stores


def test_store_of_another_layout_is_made_anew(tiny_checkpoint, home_of):
    home = home_of(tiny_checkpoint(FAMILY))
    prepare(home, Precision.NESTED, on_progress=ignore)
    before = hashes(home)
    path = home.store_dir(Precision.NESTED) / MANIFEST_FILE
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"layout": "of another processor"}))
    prepare(home, Precision.NESTED, on_progress=ignore)
    assert hashes(home) == before


def test_hub_is_asked_nothing_while_another_process_prepares_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module.hub_home, "find", lambda *_: pytest.fail("it was asked"))
    home = ModelLibrary(tmp_path).resolve("owner/tiny")
    with locked(home), pytest.raises(ModelBusyError, match="another process"):
        prepare(home, Precision.NESTED, on_progress=ignore)


def test_prepared_model_whose_checkpoint_is_gone_stays_ready(tmp_path, home_of):
    folder = tiny_models.save_tiny(FAMILY, tmp_path / "model")
    home = home_of(folder)
    prepare(home, Precision.NESTED, on_progress=ignore)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    prepare(home_of(folder), Precision.NESTED, on_progress=ignore)


def test_shard_damaged_is_named_and_nothing_is_written(tmp_path, home_of):
    folder = tiny_models.save_tiny(FAMILY, tmp_path / "model", max_shard_size="100KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    home = home_of(folder)
    with pytest.raises(CheckpointError, match=shard.name):
        prepare(home, Precision.NESTED, on_progress=ignore)
    assert not home.root.exists()


def test_conversion_holds_one_expert_at_a_time(tiny_checkpoint, home_of, monkeypatch):
    live, most = set(), []
    load = CheckpointExperts.load

    def counted(self, layer, expert):
        tensors = load(self, layer, expert)

        live.add(id(tensors.up))
        weakref.finalize(tensors.up, live.discard, id(tensors.up))
        most.append(len(live))
        return tensors

    monkeypatch.setattr(CheckpointExperts, "load", counted)
    prepare(home_of(tiny_checkpoint(FAMILY)), Precision.NESTED, on_progress=ignore)
    assert len(most) == 16
    assert max(most) == 1


def test_backbone_of_another_version_is_made_anew(tiny_checkpoint, home_of, monkeypatch):
    home = home_of(tiny_checkpoint(FAMILY))
    prepare(home, Precision.NESTED, on_progress=ignore)
    monkeypatch.setattr(backbone_module, "BACKBONE_VERSION", 2)
    seen = []
    prepare(home, Precision.NESTED, on_progress=lambda *args: seen.append(args))
    assert {step for step, *_ in seen} == {"backbone"}
