"""The store file: alignment, addresses, resuming, damage."""

import dataclasses
import json

import pytest
import torch
from mira_engine.checkpoint import store as store_module
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.formats import ExpertTensors, make_format
from mira_engine.checkpoint.store import ExpertStore, StoreManifest, StoreWriter, file_name
from mira_engine.errors import StoreError
from mira_engine.types import ExpertShape, Plane, Precision
from safetensors import safe_open

SHAPE = ExpertShape(hidden_size=64, intermediate_size=32)
NUM_LAYERS, NUM_EXPERTS = 3, 4


def manifest_of(precision=Precision.NESTED, revision="r1"):
    return StoreManifest.of_format(
        make_format(precision, SHAPE),
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        source="test",
        revision=revision,
    )


def records_of(layer, precision=Precision.NESTED):
    fmt = make_format(precision, SHAPE)
    generator = torch.Generator().manual_seed(layer)
    for _ in range(NUM_EXPERTS):
        up = torch.randn(SHAPE.up_rows, SHAPE.hidden_size, generator=generator)
        down = torch.randn(SHAPE.hidden_size, SHAPE.intermediate_size, generator=generator)
        yield fmt.encode(ExpertTensors(up=up, down=down))


def write_store(folder, precision=Precision.NESTED):
    writer = StoreWriter(folder, manifest_of(precision))
    for layer in range(NUM_LAYERS):
        writer.write_layer(layer, records_of(layer, precision))
    writer.finish()
    return ExpertStore.open(folder)


@pytest.mark.parametrize("precision", list(Precision))
def test_read_record_gives_back_what_was_written(tmp_path, precision):
    store = write_store(tmp_path, precision)
    for layer in range(NUM_LAYERS):
        for expert, records in enumerate(records_of(layer, precision)):
            for plane, record in records.items():
                assert torch.equal(store.read_record(layer, plane, expert), record)


def test_record_location_is_aligned_and_readable_by_any_safetensors_reader(tmp_path):
    store = write_store(tmp_path)
    for plane in store.format.planes:
        path, offset, num_bytes = store.record_location(1, plane, 2)
        assert offset % 4096 == 0
        assert num_bytes % 4096 == 0
        with safe_open(path, "pt") as file:
            assert list(file.keys()) == ["records"]
            records = file.get_tensor("records")
        assert records.shape == (NUM_EXPERTS, num_bytes)
        raw = path.read_bytes()[offset : offset + num_bytes]
        assert raw == records[2].numpy().tobytes()


def test_manifest_names_sizes_and_survives_its_own_reading(tmp_path):
    store = write_store(tmp_path)
    manifest = store.manifest
    assert manifest.group_size == 32
    assert len(manifest.files) == 2 * NUM_LAYERS
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("layer-*"))
    assert manifest.total_bytes == on_disk
    assert manifest == StoreManifest.from_file(tmp_path / MANIFEST_FILE)
    store.verify()


def test_open_before_finish_says_unfinished(tmp_path):
    writer = StoreWriter(tmp_path, manifest_of())
    writer.write_layer(0, records_of(0))
    with pytest.raises(StoreError, match="unfinished"):
        ExpertStore.open(tmp_path)


def test_writer_goes_on_behind_finished_layers_without_touching_them(tmp_path):
    first = StoreWriter(tmp_path, manifest_of())
    first.write_layer(0, records_of(0))
    path = tmp_path / file_name(0, Plane.HI)
    before = path.stat()
    second = StoreWriter(tmp_path, manifest_of())
    assert [second.is_layer_done(layer) for layer in range(3)] == [True, False, False]
    for layer in (1, 2):
        second.write_layer(layer, records_of(layer))
    second.finish()
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    whole = write_store(tmp_path / "whole")
    assert ExpertStore.open(tmp_path).manifest == whole.manifest


def test_write_layer_interrupted_leaves_no_file_of_that_layer(tmp_path):
    writer = StoreWriter(tmp_path, manifest_of())

    def broken():
        yield next(records_of(0))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write_layer(0, broken())
    assert list(tmp_path.glob("layer-*")) == []
    assert not writer.is_layer_done(0)


@pytest.mark.parametrize(
    "other", [{"precision": Precision.INT8}, {"revision": "r2"}], ids=["precision", "revision"]
)
def test_writer_of_another_store_starts_empty(tmp_path, other):
    write_store(tmp_path)
    writer = StoreWriter(tmp_path, manifest_of(**other))
    assert list(tmp_path.iterdir()) == []
    assert not writer.is_finished


def test_writer_of_a_finished_store_is_finished_and_keeps_it(tmp_path):
    write_store(tmp_path)
    writer = StoreWriter(tmp_path, manifest_of())
    assert writer.is_finished
    assert writer.missing_bytes == 0
    ExpertStore.open(tmp_path).verify()


def test_writer_repairs_a_layer_whose_file_is_short(tmp_path):
    write_store(tmp_path)
    path = tmp_path / file_name(1, Plane.LO)
    path.write_bytes(path.read_bytes()[:-4096])
    writer = StoreWriter(tmp_path, manifest_of())
    assert not writer.is_finished
    assert [writer.is_layer_done(layer) for layer in range(3)] == [True, False, True]
    writer.write_layer(1, records_of(1))
    writer.finish()
    ExpertStore.open(tmp_path).verify()


def test_open_names_a_missing_and_a_truncated_file(tmp_path):
    write_store(tmp_path)
    path = tmp_path / file_name(2, Plane.HI)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(StoreError, match=path.name):
        ExpertStore.open(tmp_path)
    path.unlink()
    with pytest.raises(StoreError, match=path.name):
        ExpertStore.open(tmp_path)


def test_open_refuses_a_file_of_another_layout(tmp_path):
    write_store(tmp_path)
    path = tmp_path / file_name(0, Plane.HI)
    data = path.read_bytes()
    path.write_bytes(data[:4096].replace(b'"records"', b'"recalls"') + data[4096:])
    with pytest.raises(StoreError, match="does not hold what the manifest says"):
        ExpertStore.open(tmp_path)


def test_verify_names_a_file_with_one_flipped_bit(tmp_path):
    store = write_store(tmp_path)
    path = tmp_path / file_name(1, Plane.HI)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    ExpertStore.open(tmp_path)
    with pytest.raises(StoreError, match=path.name):
        store.verify()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "shape": 3}'])
def test_open_with_an_unreadable_manifest_says_so(tmp_path, text):
    write_store(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(StoreError, match="cannot be read"):
        ExpertStore.open(tmp_path)


def test_open_of_another_version_says_which(tmp_path, monkeypatch):
    write_store(tmp_path)
    monkeypatch.setattr(store_module, "STORE_VERSION", 9)
    with pytest.raises(StoreError, match=r"version 1; this program reads version 9"):
        ExpertStore.open(tmp_path)


def test_manifest_with_other_record_sizes_is_refused(tmp_path):
    write_store(tmp_path)
    path = tmp_path / MANIFEST_FILE
    raw = json.loads(path.read_text())
    raw["planes"]["hi"] += 4096
    path.write_text(json.dumps(raw))
    with pytest.raises(StoreError, match="records of another form"):
        ExpertStore.open(tmp_path)


def test_is_same_store_looks_past_files_and_the_name_for_people():
    one = manifest_of()
    assert one.is_same_store(dataclasses.replace(one, source="elsewhere"))
    assert not one.is_same_store(dataclasses.replace(one, layout="other"))
