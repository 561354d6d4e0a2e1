"""Writes files so that a name only ever means a whole file.

Everything goes to `<name>.partial`, is flushed to the disk and renamed. Owns the
safetensors header, the check of free space and what a full disk is called. Knows
nothing of models.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..config import format_bytes
from ..errors import DiskSpaceError, PrepareError
from .shards import TORCH_DTYPES

PARTIAL_SUFFIX = ".partial"
MOVE_DATA = "choose another data directory"
"""What helps where the data's disk is too small."""

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CHUNK_BYTES = 1 << 20

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""Element type and dimensions of a tensor that will be written."""


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda done: None) -> str:
    """Hashes a file; `on_bytes` receives the bytes read so far, every megabyte."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done)
    return digest.hexdigest()


def free_bytes(path: Path) -> int:
    """Returns the free bytes of the file system that would hold `path`."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def has_space(path: Path, num_bytes: int) -> bool:
    """Whether so many bytes are free where `path` would be."""
    return num_bytes <= free_bytes(path)


def is_one_disk(path: Path, other: Path) -> bool:
    """Whether two folders that exist lie in one file system."""
    return os.stat(path).st_dev == os.stat(other).st_dev


def require_space(path: Path, needed_bytes: int, what: str, *, elsewhere: str = MOVE_DATA) -> None:
    """Checks that a job's files will fit before it begins.

    Raises:
        DiskSpaceError: They will not; says the bytes needed, free and missing.
    """
    free = free_bytes(path)
    if needed_bytes > free:
        raise DiskSpaceError(
            f"{what} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes) at {path}, "
            f"{format_bytes(free)} ({free} bytes) are free.",
            hint=f"Free {format_bytes(needed_bytes - free)} more, or {elsewhere}.",
        )


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Names what went wrong with the disk while `path` was written.

    Raises:
        DiskSpaceError: The disk or the quota is full.
        PrepareError: Any other failure of the file system.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL_DISK:
            raise DiskSpaceError(
                f"The disk is full: {path} could not be written ({error.strerror}).",
                hint="What was finished before is kept. Free some space and run it again.",
            ) from error
        raise PrepareError(
            f"{path} could not be written: {error.strerror or error}.",
            hint="Check the permissions of the data directory.",
        ) from error


def partial_path(path: Path) -> Path:
    """Returns the name a file has until it is whole."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last through a power cut, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON with sorted keys by rename.

    Raises:
        DiskSpaceError: The disk is full.
        PrepareError: The file cannot be written.
    """
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a small file by rename.

    Raises:
        DiskSpaceError: The disk is full.
        PrepareError: The file cannot be written.
    """
    partial = partial_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)


def header_bytes(
    specs: Mapping[str, TensorSpec],
    *,
    alignment: int = 8,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Builds a safetensors header, padded so that data starts on `alignment` bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset = 0
    for name, (dtype, shape) in specs.items():
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % alignment)
    return len(raw).to_bytes(8, "little") + raw


class TensorFileWriter:
    """Writes one safetensors file from pieces that come in the order of its header.

    Used as a context: left with an exception the partial file is removed, so that a full
    disk gets its room back; left in order it is checked for length, flushed and renamed.

    Attributes:
        path: The finished file's name.
        num_bytes: Bytes written so far, header included.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        *,
        alignment: int = 8,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.num_bytes = 0
        self._partial = partial_path(path)
        self._digest = hashlib.sha256()
        self._header = header_bytes(specs, alignment=alignment, metadata=metadata)
        sizes = json.loads(self._header[8:])
        ends = [entry["data_offsets"][1] for key, entry in sizes.items() if key != "__metadata__"]
        self.total_bytes = len(self._header) + max(ends, default=0)
        self._file: Any = None

    def __enter__(self) -> TensorFileWriter:
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb", buffering=0)
        try:
            self._write(memoryview(self._header))
        except PrepareError as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def append(self, tensor: torch.Tensor) -> None:
        """Writes the next tensor's bytes, or the next part of one.

        Raises:
            DiskSpaceError: The disk is full.
            PrepareError: The file cannot be written.
        """
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._write(memoryview(flat.numpy()))

    def _write(self, view: memoryview) -> None:
        self._digest.update(view)
        self.num_bytes += len(view)
        with disk_errors(self.path):
            while view:
                view = view[self._file.write(view) :]

    @property
    def sha256(self) -> str:
        """Hash of what was written so far."""
        return self._digest.hexdigest()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or self.num_bytes != self.total_bytes:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            assert error is not None, "fewer or more bytes than the header says"
            return
        with disk_errors(self.path):
            try:
                os.fsync(self._file.fileno())
            except OSError:
                self._partial.unlink(missing_ok=True)
                raise
            finally:
                self._file.close()
            self._partial.replace(self.path)
            sync_folder(self.path.parent)
