"""What the native link has of its own: few calls, safe memory, proved before it is used."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_links import (
    RECORD,
    Link,
    num_native_threads,
    write_records,
)
from mira_engine.runtime.native_disk import NativeDiskTransfer
from mira_engine.types import ExpertId, Plane
from mira_kernels import native, reader
from mira_kernels.pages import huge_bytes


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return write_records(tmp_path)


@pytest.fixture
def library(native_cache: Path) -> reader.ReaderLibrary:
    found = reader.find_library(native_cache)
    assert found is not None
    return found


@pytest.fixture
def native_link(library: reader.ReaderLibrary, records: Path) -> Iterator[Link]:
    link = Link(lambda **arguments: NativeDiskTransfer(library, **arguments), records)
    yield link
    link.transfer.close()


def test_poll_with_nothing_landed_makes_no_call(native_link: Link) -> None:
    calls = []
    native_link.transfer._reader._call_take = lambda *arguments: calls.append(arguments)
    assert native_link.transfer.poll() == []
    assert calls == []


def test_many_landed_are_taken_at_once(library: reader.ReaderLibrary, records: Path) -> None:
    count = 3 * reader.MAX_LANDED + 1
    done = threading.Semaphore(0)
    link = Link(
        lambda **arguments: NativeDiskTransfer(library, **arguments),
        records,
        on_piece=lambda num_bytes, is_end: done.release(),
    )
    for layer in range(count + 1):  # Once the last is read, all others have landed.
        link.transfer.submit(ExpertId(layer, 1), 0, is_demand=True)
    for _ in range(count + 1):
        assert done.acquire(timeout=10)
    landed = link.transfer.wait_any(10)
    assert [item.expert.layer for item in landed][:count] == list(range(count))
    link.transfer.close()


def test_record_is_located_once(library: reader.ReaderLibrary, records: Path) -> None:
    located = []

    def locate(expert: ExpertId, plane: Plane) -> tuple[Path, int, int]:
        located.append(expert)
        return records, expert.expert * RECORD, RECORD

    memory = memoryview(huge_bytes(RECORD).numpy())
    transfer = NativeDiskTransfer(
        library,
        locate=locate,
        planes=(Plane.WHOLE,),
        slot_buffers=[{Plane.WHOLE: memory}],
        num_threads=1,
        is_direct=True,
    )
    for _ in range(2):
        transfer.submit(ExpertId(0, 2), 0, is_demand=True)
        assert len(transfer.wait_any(10)) == 1
    assert located == [ExpertId(0, 2)]
    transfer.close()


def test_record_that_does_not_fit_its_slot_is_refused(
    library: reader.ReaderLibrary, records: Path
) -> None:
    memory = memoryview(huge_bytes(RECORD).numpy())
    transfer = NativeDiskTransfer(
        library,
        locate=lambda expert, plane: (records, 0, 2 * RECORD),
        planes=(Plane.WHOLE,),
        slot_buffers=[{Plane.WHOLE: memory}],
        num_threads=1,
        is_direct=True,
    )
    with pytest.raises(ValueError, match="8192 bytes for 4096"):
        transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    transfer.close()


def test_transfer_nobody_closed_ends_its_threads(
    library: reader.ReaderLibrary, records: Path
) -> None:
    num_threads = num_native_threads()
    link = Link(lambda **arguments: NativeDiskTransfer(library, **arguments), records)
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    link.transfer = None
    gc.collect()
    assert num_native_threads() == num_threads


def test_library_is_found_where_it_is_built_or_loaded(
    native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reader.find_library(None) is None or native.is_loaded()
    monkeypatch.setattr(native, "_loaded", None)
    assert reader.find_library(None) is None
    assert reader.find_library(tmp_path) is None
    path = native.library_path(native_cache)
    assert reader.find_library(native_cache) is reader.load_library(path)
    monkeypatch.setattr(native, "_loaded", path)
    assert reader.find_library(None) is reader.load_library(path)


def test_library_without_readers_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native, "_loaded", broken)
    assert reader.find_library(None) is None


def test_readers_that_read_wrongly_are_not_used(
    native_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = native.library_path(native_cache)
    assert reader.find_wrong(path) is None
    submit = reader.RecordReader.submit

    def swap(self, key, slot, spans_at, to_at, count, is_demand):
        submit(self, key, slot, spans_at, to_at, count - 1, is_demand)

    monkeypatch.setattr(reader.RecordReader, "submit", swap)
    assert reader.find_wrong(path) == "what their readers read is wrong"
    reader._proved.cache_clear()
    monkeypatch.setattr(native, "_loaded", path)
    assert reader.find_library(None) is None
    reader._proved.cache_clear()
