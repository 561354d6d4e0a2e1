"""The native readers: threads without an interpreter that read records into memory.

Owns the calls into `csrc/mira_reader.cpp`, which lies in the kernels' library; knows files,
addresses and keys, no experts. Nothing of torch is needed, and no result depends on it, so
a library that is built can be taken up at any time. One thread uses a `RecordReader`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from . import native

MAX_LANDED = 64
"""Most records that one `take` returns."""

CLOSE_TIMEOUT_S = 10.0
"""How long a read that hangs is waited for."""

_PROOF_BYTES = 4096
_PROOF_TIMEOUT_S = 10.0


class Failure(IntEnum):
    """Why a record is not there."""

    NONE = 0
    CANNOT_OPEN = 1
    CANNOT_READ = 2
    ENDS_BEFORE = 3


class Span(ctypes.Structure):
    """Part of a record: which file, and offset and length in it in bytes."""

    _fields_ = [("file", ctypes.c_int64), ("offset", ctypes.c_int64), ("num_bytes", ctypes.c_int64)]


class Landed(ctypes.Structure):
    """The end of one record's move.

    Attributes:
        key: As it was submitted.
        slot: As it was submitted.
        seconds: Time that moving took, pauses left out.
        failure: A `Failure`.
        code: Of a failure the system's error number.
        file: Of a failure which file.
        stop_byte: Of a failure where in the file the read should have ended.
    """

    _fields_ = [
        ("key", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("failure", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("file", ctypes.c_int64),
        ("stop_byte", ctypes.c_int64),
    ]


_OnPiece = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int32)
_hanging: list[object] = []
"""Memory that a read which hangs may yet write to: it is never given back."""


@dataclass(frozen=True, slots=True)
class ReaderLibrary:
    """The library, twice: a call of `held` keeps the interpreter's lock, one of `free` does not.

    Giving the lock up for a call of a microsecond is dear: another thread that wants it has
    it then for up to five milliseconds.
    """

    held: ctypes.PyDLL
    free: ctypes.CDLL


@functools.cache
def load_library(path: Path) -> ReaderLibrary:
    """Loads the readers of a library that `native` built. Once a process and library.

    Raises:
        OSError: It is no library, or has no readers.
    """
    library = ReaderLibrary(ctypes.PyDLL(str(path)), ctypes.CDLL(str(path)))
    handle, i32, i64, f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "create": (handle, [i64, f64, f64, _OnPiece]),
        "add_file": (i64, [handle, ctypes.c_char_p, i32]),
        "submit": (None, [handle, i64, i64, handle, handle, i64, i32]),
        "promote": (None, [handle, i64]),
        "take": (i64, [handle, handle, i64, f64]),
        "set_rate": (None, [handle, f64]),
        "num_landed": (handle, [handle]),
        "is_any_buffered": (i32, [handle]),
        "close": (i32, [handle, f64]),
        "free": (None, [handle]),
    }
    for calls in (library.held, library.free):
        for name, (result, arguments) in signatures.items():
            try:
                call = getattr(calls, f"mira_reader_{name}")
            except AttributeError as error:
                raise OSError(f"{path.name} has no readers ({error}).") from error
            call.restype, call.argtypes = result, arguments
    return library


def find_library(cache_dir: Path | None) -> ReaderLibrary | None:
    """Returns the readers of the kernels in use, else of those built in `cache_dir`.

    `None` where there are none, or where a small read through them fails.
    """
    path = native.loaded_library()
    if path is None and cache_dir is not None and native.is_built(cache_dir):
        path = native.library_path(cache_dir)
    return path if path is None else _proved(path)


@functools.cache
def _proved(path: Path) -> ReaderLibrary | None:
    try:
        return load_library(path) if find_wrong(path) is None else None
    except OSError:
        return None


def find_wrong(path: Path) -> str | None:
    """Reads a piece of the library itself by its own readers. Says what is wrong, if anything.

    Raises:
        OSError: The library does not load.
    """
    truth = path.read_bytes()[: 2 * _PROOF_BYTES]
    room = ctypes.create_string_buffer(3 * _PROOF_BYTES)
    start = -ctypes.addressof(room) % _PROOF_BYTES  # O_DIRECT moves to aligned addresses only.
    reader = RecordReader(load_library(path), num_threads=1, kept=room)
    try:
        file = reader.add_file(path, is_direct=True)
        spans = (Span * 2)(*(Span(file, at, _PROOF_BYTES) for at in (0, _PROOF_BYTES)))
        to = (ctypes.c_uint64 * 2)(
            *(ctypes.addressof(room) + start + at for at in (_PROOF_BYTES, 0))
        )
        reader.submit(7, 3, ctypes.addressof(spans), ctypes.addressof(to), 2, False)
        reader.promote(7)
        landed = [(item.key, item.slot, item.failure) for item in reader.wait(_PROOF_TIMEOUT_S)]
    finally:
        reader.close()
    found = room.raw[start : start + 2 * _PROOF_BYTES]
    if landed != [(7, 3, Failure.NONE)] or found[_PROOF_BYTES:] + found[:_PROOF_BYTES] != truth:
        return "what their readers read is wrong"
    return None


class RecordReader:
    """A pool of native threads that move records from files to addresses.

    Demands come before the rest; the rest is read in pieces and gives way to them.

    Args:
        library: What `find_library` found.
        num_threads: Reader threads.
        bytes_per_s: Rate of an emulated link, `None` for the disk's own.
        latency_s: What the emulated link adds to each record.
        on_piece: Told the bytes of each piece read and whether its record ends with it, in a
            reader's thread, which then waits for the interpreter. For tests.
        kept: What owns the memory that is read to: kept as long as somebody may write to it.

    Raises:
        OSError: The threads could not be started.
    """

    def __init__(
        self,
        library: ReaderLibrary,
        *,
        num_threads: int,
        bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        on_piece: Callable[[int, bool], None] | None = None,
        kept: object = None,
    ) -> None:
        held, free = library.held, library.free
        called = _OnPiece(on_piece) if on_piece is not None else _OnPiece()
        handle = free.mira_reader_create(num_threads, bytes_per_s or 0.0, latency_s, called)
        if not handle:
            raise OSError("The reader threads could not be started.")
        self._handle = handle
        self._library = library
        self._call_submit = held.mira_reader_submit
        self._call_take = held.mira_reader_take
        self._num_landed = ctypes.c_int64.from_address(held.mira_reader_num_landed(handle))
        self._landed = (Landed * MAX_LANDED)()
        self._landed_at = ctypes.addressof(self._landed)
        self._end = weakref.finalize(self, _close_and_free, free, handle, (kept, called))

    def add_file(self, path: Path, *, is_direct: bool) -> int:
        """Returns the number by which spans name a file. It is opened when it is first read."""
        name = os.fsencode(path.absolute())
        return self._library.held.mira_reader_add_file(self._handle, name, is_direct)

    def submit(
        self, key: int, slot: int, spans_at: int, to_at: int, count: int, is_demand: bool
    ) -> None:
        """Queues a record.

        Args:
            key: Comes back when it has landed.
            slot: Comes back, too.
            spans_at: Address of `count` spans, read before this returns.
            to_at: Address of `count` addresses (uint64) to read them to.
            count: Of both.
            is_demand: Whether somebody waits for it.
        """
        self._call_submit(self._handle, key, slot, spans_at, to_at, count, is_demand)

    def promote(self, key: int) -> None:
        """Makes a prefetch a demand, whether it is queued, set aside or under way."""
        self._library.held.mira_reader_promote(self._handle, key)

    def poll(self) -> Sequence[Landed]:
        """Returns some of what has landed; valid until the next call."""
        if not self._num_landed.value:
            return ()
        count = self._call_take(self._handle, self._landed_at, MAX_LANDED, 0.0)
        return self._landed[:count]

    def wait(self, timeout_s: float) -> Sequence[Landed]:
        """Waits until something lands; none after `timeout_s`. Valid until the next call."""
        if self._num_landed.value:
            return self.poll()
        take = self._library.free.mira_reader_take
        count = take(self._handle, self._landed_at, MAX_LANDED, timeout_s)
        return self._landed[:count]

    @property
    def is_any_buffered(self) -> bool:
        """Whether a file had to be opened without O_DIRECT."""
        return bool(self._library.held.mira_reader_is_any_buffered(self._handle))

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Changes the emulated link's rate, `None` for the disk's own."""
        self._library.held.mira_reader_set_rate(self._handle, bytes_per_s or 0.0)

    def close(self) -> None:
        """Drops what is queued, waits for what is under way and closes the files.

        What has landed can still be taken.
        """
        self._library.free.mira_reader_close(self._handle, CLOSE_TIMEOUT_S)


def _close_and_free(free: ctypes.CDLL, handle: int, kept: object) -> None:
    if not free.mira_reader_close(handle, CLOSE_TIMEOUT_S):
        _hanging.append(kept)
    free.mira_reader_free(handle)
