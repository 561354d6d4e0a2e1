"""Moves a repository's files into the hub client's cache: resumable, checked, several at once.

The client begins a file anew when a process dies in the middle of it, so the bytes are
moved here, over the client's own session: into `<hash>.mira-partial` beside the client's
blobs, continued by range. A file gets its name in the cache only after its hash was
checked, so a name always means a whole file. Each file is moved by one thread of a few;
the thread that asked reports, and ends them within a moment when it is told to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import filelock
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ..config import format_bytes
from ..errors import CheckpointError, HubBusyError
from .hub import USUAL_PATIENCE, HubFile, HubRevision, Patience
from .hub_cache import PARTIAL_SUFFIX, link
from .hub_errors import TRANSIENT_STATUS, plain_error, retry_after_s
from .progress import Progress
from .shards import INDEX_FILE
from .writing import disk_errors, require_space, sync_folder

MOVE_CACHE = "set HF_HOME to a folder on another disk"
"""What helps where the cache's disk is too small."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
_RATE_WINDOW_S = 5.0
_END_S = 1.0


def fetch_small_files(
    revision: HubRevision, progress: Progress, patience: Patience = USUAL_PATIENCE
) -> Path:
    """Brings configuration, tokenizer, templates and index. Returns the snapshot's folder.

    Raises:
        MiraError: As `download` says.
    """
    with disk_errors(revision.snapshot_dir):
        revision.snapshot_dir.mkdir(parents=True, exist_ok=True)
        _write_ref(revision)
    _Transfer(revision, revision.small_files, progress, patience).run(is_told=False)
    return revision.snapshot_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The download that a few files are part of, for the reports.

    Attributes:
        num_files: All files.
        num_bytes: Their bytes.
        num_files_before: Files that are through.
        num_bytes_before: Their bytes.
    """

    num_files: int
    num_bytes: int
    num_files_before: int = 0
    num_bytes_before: int = 0


def download(
    revision: HubRevision,
    progress: Progress,
    *,
    patience: Patience = USUAL_PATIENCE,
    spare_bytes: int = 0,
    files: Sequence[HubFile] | None = None,
    whole: Whole | None = None,
    elsewhere: str = MOVE_CACHE,
) -> Path:
    """Brings all that is needed of a repository into the client's cache, and no more.

    Args:
        revision: What to bring, from `hub.look_up`.
        progress: Reports step `download` in bytes; asked ten times a second.
        patience: When to give up.
        spare_bytes: Room that must be left on the disk beside the files.
        files: Only these of the weights.
        whole: What they are a part of; themselves where it is not given.
        elsewhere: What else than room helps where the disk is too small.

    Returns:
        The snapshot's folder: the checkpoint.

    Raises:
        UnsupportedModelError: There are no safetensors weights.
        CheckpointError: A file is absent, or comes with other contents twice.
        HubError: The hub refuses, is out of order or cannot be reached.
        DiskSpaceError: The disk is too small or full; what is there is kept.
        CancelledError: Somebody asked to stop; what is there is kept.
    """
    if files is None:
        folder = fetch_small_files(revision, progress, patience)
        files = revision.weight_files(folder / INDEX_FILE)
    transfer = _Transfer(revision, files, progress, patience, whole)
    require_space(
        Path(constants.HF_HUB_CACHE),
        transfer.missing_bytes + spare_bytes,
        f"{revision.repo_id} with what is made of it" if spare_bytes else revision.repo_id,
        elsewhere=elsewhere,
    )
    transfer.run(is_told=True)
    return revision.snapshot_dir


def cached_bytes(revision: HubRevision, files: Iterable[HubFile]) -> int:
    """Returns how many bytes of the files are in the cache, unfinished ones included."""
    return sum(_here_bytes(revision, file) for file in files)


def _blob(revision: HubRevision, file: HubFile) -> Path:
    return revision.repo_dir / "blobs" / file.etag


def _partial(revision: HubRevision, file: HubFile) -> Path:
    return _blob(revision, file).with_name(file.etag + PARTIAL_SUFFIX)


def _here_bytes(revision: HubRevision, file: HubFile) -> int:
    for path in (
        revision.snapshot_dir / file.name,
        _blob(revision, file),
        _partial(revision, file),
    ):
        with contextlib.suppress(OSError):
            return min(path.stat().st_size, file.num_bytes)
    return 0


def _write_ref(revision: HubRevision) -> None:
    """Tells the client's cache which commit a branch or tag was."""
    if revision.asked == revision.commit:
        return
    ref = revision.repo_dir / "refs" / revision.asked
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(revision.commit, encoding="utf-8")


class _StoppedError(Exception):
    """A thread learns that the download is over."""


class _OtherContentsError(Exception):
    """What came has another length or hash than the hub promised."""


class _Transfer:
    """A few threads that move files, and the one that watches them."""

    def __init__(
        self,
        revision: HubRevision,
        files: Sequence[HubFile],
        progress: Progress,
        patience: Patience,
        whole: Whole | None = None,
    ) -> None:
        self._revision = revision
        self._files = files
        self._whole = whole
        self._progress = progress
        self._patience = patience
        self._timeout_s = patience.read_timeout_s or float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self._here = {file.name: _here_bytes(revision, file) for file in files}
        self._waiting = deque(files)
        self._num_whole = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._error: Exception | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self._files)

    @property
    def missing_bytes(self) -> int:
        """Bytes that have to come."""
        with self._lock:
            return self.total_bytes - sum(self._here.values())

    # -- the thread that asked -----------------------------------------------------------

    def run(self, *, is_told: bool) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"mira-hub-{number}", daemon=True)
            for number in range(min(self._patience.num_parallel, len(self._files)))
        ]
        samples: deque[tuple[float, int]] = deque()
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and self._error is None:
                if is_told:
                    self._report(samples)
                self._progress.check()
                for thread in threads:
                    thread.join(_POLL_S / len(threads))
        finally:
            self._end(threads)
        if self._error is not None:
            raise plain_error(
                self._error, repo_id=self._revision.repo_id, revision=self._revision.asked
            ) from self._error
        if is_told:
            self._report(samples)

    def _report(self, samples: deque[tuple[float, int]]) -> None:
        whole = self._whole or Whole(num_files=len(self._files), num_bytes=self.total_bytes)
        now = time.monotonic()
        done = whole.num_bytes_before + self.total_bytes - self.missing_bytes
        samples.append((now, done))
        while len(samples) > 2 and now - samples[0][0] > _RATE_WINDOW_S:
            samples.popleft()
        seconds = now - samples[0][0]
        rate = max(done - samples[0][1], 0) / seconds if seconds > 0 else 0.0
        num_done = whole.num_files_before + self._num_whole
        detail = f"{num_done} of {whole.num_files} files, {format_bytes(int(rate))}/s"
        self._progress.report("download", done, whole.num_bytes, "bytes", detail)

    def _end(self, threads: list[threading.Thread]) -> None:
        """Stops the threads; one that hangs in a name look-up ends later and touches nothing."""
        self._stopped.set()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- the threads ---------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                with self._lock:
                    if not self._waiting:
                        return
                    file = self._waiting.popleft()
                self._bring(file)
                with self._lock:
                    self._here[file.name] = file.num_bytes
                    self._num_whole += 1
        except _StoppedError:
            return
        except Exception as error:  # noqa: BLE001 - told in the thread that asked
            self._error = self._error or error
            self._stopped.set()

    def _bring(self, file: HubFile) -> None:
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / self._revision.repo_dir.name
        with disk_errors(lock):
            lock.mkdir(parents=True, exist_ok=True)
        with self._locked(lock / f"{file.etag}.lock"):
            blob = _blob(self._revision, file)
            with disk_errors(blob):
                blob.parent.mkdir(parents=True, exist_ok=True)
                if blob.exists() and not self._is_whole(blob, file):
                    blob.unlink()
            if not blob.exists():
                self._fill(file)
            with disk_errors(blob):
                link(blob, self._revision.snapshot_dir / file.name)

    @contextlib.contextmanager
    def _locked(self, path: Path):
        """Holds the client's own lock of this file; another process may be at it."""
        lock = filelock.FileLock(path)
        while True:
            self._check()
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=2 * _POLL_S)
                break
        try:
            yield
        finally:
            lock.release()

    def _fill(self, file: HubFile) -> None:
        """Moves one file; contents that are wrong are thrown away and fetched once more."""
        partial, blob = _partial(self._revision, file), _blob(self._revision, file)
        for is_last in (False, True):
            self._move(partial, file)
            if self._is_whole(partial, file):
                with disk_errors(blob):
                    partial.replace(blob)
                    sync_folder(blob.parent)
                return
            with disk_errors(partial):
                partial.unlink()
            self._count(file, 0)
            if is_last:
                raise CheckpointError(
                    f"{file.name} of {self._revision.repo_id} came with wrong contents twice; "
                    "nothing of it was kept.",
                    hint="Try again later or on another network; a proxy may change files.",
                )

    def _move(self, partial: Path, file: HubFile) -> None:
        """Asks for the rest of a file until it is there."""
        num_failed, wait_s = 0, self._patience.first_wait_s
        while True:
            before = partial.stat().st_size if partial.exists() else 0
            if before > file.num_bytes:
                partial.unlink()
                before = 0
            if before == file.num_bytes and partial.exists():
                return
            try:
                self._stream(partial, file, before)
                continue
            except (HTTPError, _OtherContentsError) as error:
                self._check()
                if partial.exists() and partial.stat().st_size > before:
                    num_failed, wait_s = 0, self._patience.first_wait_s
                num_failed += 1
                asked_s = self._asked_pause_s(error, file)
                if num_failed >= self._patience.num_tries:
                    raise self._given_up(error, file) from error
                if asked_s is not None and asked_s > self._patience.longest_wait_s:
                    raise
            if self._stopped.wait(wait_s if asked_s is None else asked_s):
                raise _StoppedError
            wait_s = min(2 * wait_s, self._patience.longest_wait_s)

    def _asked_pause_s(self, error: Exception, file: HubFile) -> int | None:
        """Returns the pause that the hub asks for; raises what no patience mends."""
        if not isinstance(error, HfHubHTTPError):
            return None
        response = error.response
        is_signed_address = response.history != []
        if response.status_code not in TRANSIENT_STATUS and not (
            is_signed_address and response.status_code == 403
        ):
            raise plain_error(
                error, repo_id=self._revision.repo_id, revision=self._revision.asked, file=file.name
            ) from error
        return retry_after_s(response.headers)

    def _given_up(self, error: Exception, file: HubFile) -> Exception:
        if isinstance(error, _OtherContentsError):
            return HubBusyError(
                f"The hub sends {file.name} of {self._revision.repo_id} empty or in other parts "
                "than were asked for.",
                hint="Try again later; what is downloaded is kept.",
            )
        return plain_error(
            error, repo_id=self._revision.repo_id, revision=self._revision.asked, file=file.name
        )

    def _stream(self, partial: Path, file: HubFile, start: int) -> None:
        """Makes one request and writes what comes; ends early with what is there kept."""
        url = huggingface_hub.hf_hub_url(
            self._revision.repo_id, file.name, revision=self._revision.commit
        )
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream("GET", url, headers=headers, timeout=self._timeout_s) as response:
            if response.status_code == 416:
                partial.unlink()
                raise _OtherContentsError
            hf_raise_for_status(response)
            is_continued = start > 0 and response.status_code == 206
            told = response.headers.get("Content-Range", "")
            if is_continued and not told.startswith(f"bytes {start}-"):
                raise _OtherContentsError
            connection = _socket_of(response)
            with (
                self._watched(connection),
                disk_errors(partial),
                partial.open("ab" if is_continued else "wb", buffering=0) as target,
            ):
                self._pump(response.iter_bytes(), target, file, start, is_continued)
        if partial.stat().st_size < file.num_bytes:
            raise _OtherContentsError

    def _pump(
        self,
        chunks: Iterable[bytes],
        target: BinaryIO,
        file: HubFile,
        start: int,
        is_continued: bool,
    ) -> None:
        done = start if is_continued else 0
        for chunk in chunks:
            self._check()
            view = memoryview(chunk)[: file.num_bytes - done]
            while view:
                view = view[target.write(view) :]
            done = min(done + len(chunk), file.num_bytes)
            self._count(file, done)
        os.fsync(target.fileno())

    @contextlib.contextmanager
    def _watched(self, connection: socket.socket | None):
        """Lets `_end` break a read that waits."""
        if connection is None:
            yield
            return
        with self._lock:
            self._sockets.add(connection)
        try:
            self._check()
            yield
        finally:
            with self._lock:
                self._sockets.discard(connection)

    def _count(self, file: HubFile, done: int) -> None:
        with self._lock:
            self._here[file.name] = done

    def _check(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError

    def _is_whole(self, path: Path, file: HubFile) -> bool:
        """Whether a file has the promised length and hash; the files end themselves early."""
        size = path.stat().st_size
        if size != file.num_bytes:
            return False
        digest = (
            hashlib.sha256()
            if file.is_large
            else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        )
        with path.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                self._check()
                digest.update(chunk)
        return digest.hexdigest() == file.etag


def _socket_of(response: object) -> socket.socket | None:
    extensions = getattr(response, "extensions", {})
    stream = extensions.get("network_stream")
    found = stream.get_extra_info("socket") if stream is not None else None
    return found if isinstance(found, socket.socket) else None
