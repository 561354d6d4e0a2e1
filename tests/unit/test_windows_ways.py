"""What Windows lacks or does otherwise, taken away or imitated one by one."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from mira_app import engine_log, reporting
from mira_app.chat_files import free_path
from mira_app.engine_client import EngineClient
from mira_engine.checkpoint import hub_cache
from mira_engine.errors import StoreError, UnknownModelError
from mira_engine.events import Heartbeat
from mira_engine.library import SOURCE_FILE, ModelLibrary
from mira_engine.predictor.bank import load_choice, load_far_head, save_choice, save_far_head
from mira_engine.predictor.baselines import Popularity
from mira_engine.predictor.far import FarHead
from mira_engine.predictor.train import LayerChoice
from mira_engine.runtime import disk
from mira_engine.runtime.disk import DiskTransfer, open_for_records, read_exactly
from mira_engine.types import RECORD_ALIGNMENT, ExpertId, Plane
from mira_engine.worker import EventWriter
from mira_kernels import pages
from mira_kernels.pages import huge_bytes

RECORD = RECORD_ALIGNMENT
NUM_EXPERTS = 64
WAIT_S = 60.0
"""Only a failure takes so long."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without reads at a position, direct reads and advice on files."""
    for name in ("preadv", "O_DIRECT", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """One record for each expert, all of it the expert's number."""
    path = tmp_path / "layer-0000.whole.safetensors"
    path.write_bytes(b"".join(bytes([e]) * RECORD for e in range(NUM_EXPERTS)))
    return path


def test_readers_without_positions_never_mix_their_records(
    elsewhere, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = huge_bytes(NUM_EXPERTS * RECORD)
    slots = [memory[i * RECORD : (i + 1) * RECORD] for i in range(NUM_EXPERTS)]
    together, seen = threading.Barrier(4), threading.local()

    class MeetingFile(io.FileIO):
        """A file whose readers meet once between seeking and reading."""

        def seek(self, *args: int) -> int:
            place = super().seek(*args)
            if not hasattr(seen, "has_met"):
                seen.has_met = True
                together.wait(timeout=WAIT_S)
            return place

    monkeypatch.setattr(disk.io, "FileIO", MeetingFile)
    transfer = DiskTransfer(
        locate=lambda expert, plane: (records, expert.expert * RECORD, RECORD),
        planes=(Plane.WHOLE,),
        slot_buffers=[{Plane.WHOLE: memoryview(slot.numpy())} for slot in slots],
        num_threads=4,
        is_direct=True,
    )
    try:
        for expert in range(NUM_EXPERTS):
            transfer.submit(ExpertId(0, expert), expert, is_demand=True)
        landed = []
        while len(landed) < NUM_EXPERTS:
            got = transfer.wait_any(WAIT_S)
            assert got, "nothing landed"
            landed += got
    finally:
        transfer.close()
    assert not transfer.is_direct
    assert all(item.error is None for item in landed)
    assert all((slot == expert).all() for expert, slot in enumerate(slots))


def test_read_without_positions_gives_the_bytes_and_names_a_short_file(
    elsewhere, records: Path
) -> None:
    buffer = bytearray(2 * RECORD)
    fd, is_direct = open_for_records(records, is_direct=True)
    try:
        read_exactly(fd, memoryview(buffer), 5 * RECORD, records)
        assert buffer == bytes([5]) * RECORD + bytes([6]) * RECORD
        with pytest.raises(StoreError, match="ends before"):
            read_exactly(fd, memoryview(buffer), (NUM_EXPERTS - 1) * RECORD, records)
    finally:
        os.close(fd)
    assert not is_direct


def test_records_are_opened_as_bytes_where_there_is_a_choice(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[int] = []
    real = os.open
    monkeypatch.setattr(os, "O_BINARY", 1 << 30, raising=False)
    monkeypatch.setattr(
        os, "open", lambda path, given: flags.append(given) or real(path, os.O_RDONLY)
    )
    os.close(open_for_records(records, is_direct=False)[0])
    assert all(given & os.O_BINARY for given in flags)
    assert flags


def test_memory_without_huge_pages_is_aligned_and_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pages.mmap, "MADV_HUGEPAGE", raising=False)
    room = huge_bytes(RECORD)
    assert room.data_ptr() % pages.HUGE_PAGE_BYTES == 0
    assert not room.any()


@pytest.mark.parametrize(
    ("repo", "name"),
    [("owner/model", "owner--model"), ("aux.labs/moe", "_aux.labs--moe"), ("con/x", "con--x")],
)
def test_home_of_a_model_is_never_named_like_a_device(tmp_path: Path, repo: str, name: str) -> None:
    library = ModelLibrary(tmp_path)
    home = library.resolve(repo)
    assert home.root.name == name
    home.root.mkdir(parents=True)
    (home.root / SOURCE_FILE).write_text(json.dumps({"repo": repo}), encoding="utf-8")
    assert home in library.homes()


def test_path_of_any_system_that_leads_nowhere_is_called_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_absolute", lambda self: str(self).startswith("C:"))
    with pytest.raises(UnknownModelError, match="does not exist"):
        ModelLibrary(tmp_path).resolve(r"C:\models\moe")


@pytest.mark.parametrize(("title", "name"), [("CON", "chat-con.md"), ("com1?", "chat-com1.md")])
def test_exported_chat_is_never_named_like_a_device(tmp_path: Path, title: str, name: str) -> None:
    assert free_path(tmp_path, title).name == name


# -- the hub's cache without links


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in the hub's cache on a system that makes no links for everybody."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "A required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refuse)
    folder = tmp_path / "models--owner--name"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "etag").write_bytes(b"weights")
    return folder


def test_shard_without_links_is_freed_with_its_blob(repo: Path) -> None:
    snapshot = repo / "snapshots" / "commit"
    hub_cache.link(repo / "blobs" / "etag", snapshot / "model.safetensors")
    assert not (snapshot / "model.safetensors").is_symlink()

    assert hub_cache.drop_file(snapshot, "model.safetensors") == 7

    assert list((repo / "blobs").iterdir()) == []
    assert list(snapshot.iterdir()) == []


def test_shard_without_links_stays_while_another_revision_has_it(repo: Path) -> None:
    snapshots = [repo / "snapshots" / commit for commit in ("one", "two")]
    for snapshot in snapshots:
        hub_cache.link(repo / "blobs" / "etag", snapshot / "model.safetensors")
    assert hub_cache.revision_bytes(snapshots[0]) == 0

    assert hub_cache.drop_file(snapshots[0], "model.safetensors") == 0
    assert (repo / "blobs" / "etag").read_bytes() == b"weights"

    assert hub_cache.revision_bytes(snapshots[1]) == 7
    assert hub_cache.drop_revision(snapshots[1]) == 7
    assert not repo.exists()


# -- files that are open, pipes that are not


def test_log_that_an_orphaned_engine_holds_open_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "engine-999999999.log"
    held.touch()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "used by another process", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert engine_log.make_log_file(tmp_path) == engine_log.log_path(tmp_path)


def _is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells its mappings")
def test_predictors_in_work_keep_no_file_mapped(tmp_path: Path) -> None:
    """Where one is mapped, Windows refuses to delete it when the work is done."""
    choice, far = tmp_path / "layer.safetensors", tmp_path / "far.safetensors"
    ids = torch.arange(8).view(4, 2)
    save_choice(choice, LayerChoice(predictor=Popularity.fit(ids, 8), reason="because", scores={}))
    parts = {name: torch.ones(4) for name in ("inner", "inner_bias", "outer", "outer_bias")}
    save_far_head(far, FarHead(parts | {"targets": torch.arange(4)}, 2))

    kept = load_choice(choice), load_far_head(far, 2)

    assert all(kept)
    assert not _is_mapped(choice)
    assert not _is_mapped(far)


class GonePipe(io.StringIO):
    """A pipe whose reader has gone, as Windows tells it."""

    def write(self, text: str) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_engine_takes_any_dead_pipe_as_the_apps_end() -> None:
    with pytest.raises(BrokenPipeError):
        EventWriter(GonePipe()).send(Heartbeat(uptime_s=1.0))


@pytest.mark.parametrize(("platform", "is_told"), [("win32", False), ("linux", True)])
def test_reader_that_has_gone_is_told_nothing_on_windows_either(
    platform: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(reporting.sys, "platform", platform)
    with pytest.raises(SystemExit), reporting.reporting_streams():
        raise OSError(errno.EINVAL, "Invalid argument")
    assert bool(capfd.readouterr().err) == is_told


class Terminal(io.BytesIO):
    """Bytes that somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("written", "errors", "arrow"),
    [
        (Terminal(), "strict", b"?"),
        (io.BytesIO(), "strict", "→".encode()),
        (io.BytesIO(), "surrogateescape", "→".encode()),
    ],
)
def test_character_that_the_output_does_not_have_is_no_failure(
    written: io.BytesIO, errors: str, arrow: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.TextIOWrapper(written, encoding="cp1252", errors=errors)
    monkeypatch.setattr(sys, "stdout", stdout)
    with reporting.reporting_streams():
        print("a → b \udcff")
    byte = b"\xff" if errors == "surrogateescape" else b"?"
    assert written.getvalue().split() == [b"a", arrow, b"b", byte]


def test_engine_that_windows_ended_for_want_of_memory_says_so(tmp_path: Path) -> None:
    client = EngineClient([sys.executable, "-c", "pass"], log_dir=tmp_path)
    client.start()
    assert client._process is not None
    try:
        ended = client._process._death_error(0xC0000017)
        crashed = client._process._death_error(0xC0000005)
    finally:
        client.close()
    assert "0xc0000017" in ended.message
    assert "out of memory" in ended.hint
    assert "0xc0000005" in crashed.message
    assert "out of memory" not in crashed.hint
