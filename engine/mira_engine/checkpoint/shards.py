"""Reads tensors out of a checkpoint's safetensors shards, and checks the shards first.

Owns the byte level of a downloaded checkpoint: which file holds which tensor, and
whether each file is whole. Knows no model. Every read opens its file, takes exactly
the bytes asked for and closes it again, so nothing stays mapped and memory is what
the caller holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch

from ..errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LFS_PREFIX = b"version https://git-lfs"
MAX_HEADER_BYTES = 100_000_000
SAMPLE_BYTES = 64 << 10
"""What a fingerprint reads of each end of a file."""

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)-of-(?P<total>\d{1,5})\.safetensors")
_REDOWNLOAD = "Download this file again, or the whole checkpoint."

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""safetensors' names of the element types that a checkpoint may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """Where one tensor's bytes are.

    Attributes:
        path: The shard.
        dtype: Element type.
        shape: Dimensions as stored.
        offset: First byte, from the start of the file.
        num_bytes: Length.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class CheckpointShards(Mapping[str, TensorLocation]):
    """All tensors of a checkpoint folder, by key, in the order of the file or index.

    They are in one file, in the files that an index names, or in whatever safetensors files
    there are. What the files' own headers say holds: an index may be older than they are.

    Args:
        folder: The checkpoint.
        headers: Tensors of every shard by its name, where shards may be absent: then none is
            opened before a tensor of it is read.
        fingerprint: What `fingerprint` returns, where shards may be absent.

    Raises:
        CheckpointError: No weights, or a shard is missing, truncated, a Git LFS pointer,
            unreadable, or named outside the folder, or a tensor is in two files. The message
            names the file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        headers: Mapping[str, Mapping[str, TensorLocation]] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.folder = folder
        self._headers = headers
        self._fingerprint = fingerprint
        self._locations: dict[str, TensorLocation] = {}
        if (folder / SINGLE_FILE).exists() or SINGLE_FILE in (headers or ()):
            self._locations = dict(self._header(SINGLE_FILE))
        elif (folder / INDEX_FILE).exists():
            self._read_index(folder / INDEX_FILE)
        else:
            self._read_all()

    def _read_index(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shard_of = {str(key): str(name) for key, name in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is no weight index.", hint=_REDOWNLOAD) from error
        headers = {name: self._header(name) for name in _unique(shard_of)}
        holders = _holders(headers)
        for key, name in shard_of.items():
            if key not in holders:
                raise CheckpointError(
                    f"{self.folder / name} lacks the tensor {key} that {index.name} says it holds.",
                    hint=_REDOWNLOAD,
                )
            if key not in headers[name]:
                name = self._only_holder(key, holders[key])
            self._locations[key] = headers[name][key]
        for key in holders:
            if key not in shard_of:
                self._locations[key] = headers[self._only_holder(key, holders[key])][key]

    def _read_all(self) -> None:
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(
                f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}, nor any other "
                "safetensors file.",
                hint="Only safetensors weights are read; convert or download that form.",
            )
        absent = _absent_numbers(names)
        if absent:
            raise CheckpointError(
                f"{self.folder / absent[0]} is missing.",
                hint="Download it; the other files of that name say it belongs to them.",
            )
        headers = {name: read_header(self.folder / name) for name in names}
        for key, holders in _holders(headers).items():
            self._locations[key] = headers[self._only_holder(key, holders)][key]

    def _only_holder(self, key: str, holders: list[str]) -> str:
        if len(holders) > 1:
            raise CheckpointError(
                f"{self.folder / holders[0]} and {holders[1]} both hold the tensor {key}, and "
                "nothing says which is meant.",
                hint="Keep one set of weight files in the folder.",
            )
        return holders[0]

    def _header(self, name: str) -> Mapping[str, TensorLocation]:
        path = _inside(self.folder, name)
        return read_header(path) if self._headers is None else self._headers[name]

    @property
    def may_be_absent(self) -> bool:
        """Whether shards need not be here: they come one after another."""
        return self._headers is not None

    @property
    def is_split(self) -> bool:
        """Whether a tensor's values are in another shard than its scales: these have none."""
        return False

    def shard_of(self, key: str) -> str:
        """Returns the name of the shard that holds a tensor, as the index has it."""
        return self._locations[key].path.relative_to(self.folder).as_posix()

    def __getitem__(self, key: str) -> TensorLocation:
        return self._locations[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def read(self, key: str, row: int | None = None) -> torch.Tensor:
        """Reads one tensor, or with `row` only `tensor[row : row + 1]`, from its file.

        Raises:
            CheckpointError: The file is shorter than it was, or cannot be read.
        """
        if row is not None:
            return self.read_rows(key, row, row + 1)
        where = self._locations[key]
        whole = read_bytes(where.path, where.offset, where.num_bytes)
        return whole.view(where.dtype).reshape(where.shape)

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Reads `tensor[start:stop]` of a tensor that has a first dimension.

        Raises:
            CheckpointError: The file is shorter than it was, or cannot be read.
        """
        where = self._locations[key]
        row_bytes = where.num_bytes // where.shape[0]
        rows = read_bytes(where.path, where.offset + start * row_bytes, (stop - start) * row_bytes)
        return rows.view(where.dtype).reshape(stop - start, *where.shape[1:])

    def pieces(self, key: str, piece_bytes: int = 64 << 20) -> Iterator[torch.Tensor]:
        """Reads one tensor's bytes in order, uint8, at most `piece_bytes` at a time.

        Raises:
            CheckpointError: The file is shorter than it was, or cannot be read.
        """
        where = self._locations[key]
        for start in range(0, where.num_bytes, piece_bytes):
            num_bytes = min(piece_bytes, where.num_bytes - start)
            yield read_bytes(where.path, where.offset + start, num_bytes)

    def fingerprint(self) -> str:
        """Returns a hash of each file's name, length and first and last 64 KiB.

        Reads little, and still tells two fine-tunes of one model apart.

        Raises:
            CheckpointError: A file cannot be read.
        """
        if self._fingerprint:
            return self._fingerprint
        digest = hashlib.sha256()
        for path in sorted({where.path for where in self._locations.values()}):
            size = path.stat().st_size
            sample = min(size, SAMPLE_BYTES)
            digest.update(f"{path.name} {size}\n".encode())
            digest.update(read_bytes(path, 0, sample).numpy())
            digest.update(read_bytes(path, size - sample, sample).numpy())
        return digest.hexdigest()


def read_bytes(path: Path, offset: int, num_bytes: int) -> torch.Tensor:
    """Reads a range of a file into a new uint8 tensor.

    Raises:
        CheckpointError: The file ends early or cannot be read.
    """
    target = torch.empty(num_bytes, dtype=torch.uint8)
    view = memoryview(target.numpy())
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while view:
                got = file.readinto(view)
                if not got:
                    raise CheckpointError(f"{path} ends early.", hint=_REDOWNLOAD)
                view = view[got:]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return target


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Reads a safetensors header and checks it against the length of the file.

    Raises:
        CheckpointError: The file is missing, truncated, a Git LFS pointer or no safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            if (head + file.read(len(_LFS_PREFIX)))[: len(_LFS_PREFIX)] == _LFS_PREFIX:
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights.",
                    hint="Run `git lfs pull` in that folder, or download the file itself.",
                )
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file ({size} bytes).",
                    hint=_REDOWNLOAD,
                )
            file.seek(8)
            raw = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing.", hint="Download it; the index needs every shard."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_header(path, size, raw)


def parse_header(path: Path, size: int, raw: bytes) -> dict[str, TensorLocation]:
    """Reads the text of a safetensors header and checks it against the length of the file.

    Args:
        path: The file; not opened.
        size: Its length in bytes.
        raw: The header, without the eight bytes of its length.

    Raises:
        CheckpointError: The header is no safetensors, or is of a file of another length.
    """
    length = len(raw)
    try:
        entries = {key: v for key, v in json.loads(raw).items() if key != "__metadata__"}
        found = {key: _location(path, 8 + length, entry) for key, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} has an unreadable safetensors header.", hint=_REDOWNLOAD
        ) from error
    expected = max((at.offset + at.num_bytes for at in found.values()), default=8 + length)
    if size != expected:
        word = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(
            f"{path} is {word}: {size} bytes, {expected} expected.", hint=_REDOWNLOAD
        )
    return found


def _location(path: Path, data_start: int, entry: Mapping) -> TensorLocation:
    start, end = (int(number) for number in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's offsets do not fit its shape")
    return TensorLocation(
        path=path, dtype=dtype, shape=shape, offset=data_start + start, num_bytes=end - start
    )


def _inside(folder: Path, name: str) -> Path:
    """Joins a shard's name to the folder; links inside the folder may lead elsewhere."""
    for kind in (PurePosixPath, PureWindowsPath):
        parts = kind(name)
        if not name or parts.is_absolute() or parts.drive or ".." in parts.parts:
            raise CheckpointError(
                f"{folder / INDEX_FILE} names a shard outside the folder: {name!r}.",
                hint="Do not use this checkpoint; download it from its publisher.",
            )
    return folder / name


def _unique(shard_of: Mapping[str, str]) -> dict[str, None]:
    return dict.fromkeys(shard_of.values())


def _holders(headers: Mapping[str, Mapping[str, TensorLocation]]) -> dict[str, list[str]]:
    """Returns the files that hold each tensor, in the order of the files."""
    found: dict[str, list[str]] = {}
    for name, header in headers.items():
        for key in header:
            found.setdefault(key, []).append(name)
    return found


def _absent_numbers(names: Iterable[str]) -> list[str]:
    """Returns what is missing of files that call themselves number n of N."""
    present = set(names)
    absent = []
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(present))):
        width, total = len(match["number"]), int(match["total"])
        of_number = "{stem}{number:0{width}}-of-{total}.safetensors".format
        parts = {"stem": match["stem"], "width": width, "total": match["total"]}
        first = 0 if of_number(number=0, **parts) in present else 1
        names_of_all = [of_number(number=first + each, **parts) for each in range(total)]
        absent += [name for name in names_of_all if name not in present and name not in absent]
    return absent
