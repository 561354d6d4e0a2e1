"""What a checkpoint's shards hold, known before they are here and after they are gone.

Read once, of each shard the header and the two ends: from the file where it is here, else
from the hub by range. That is enough to place every tensor and for the checkpoint's
fingerprint, so that a preparation which deletes shards on its way makes the same stores,
under the same fingerprint, as one that keeps them. Kept in the model's home until it is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..errors import CheckpointError
from ..types import Precision
from .progress import Progress
from .shards import (
    MAX_HEADER_BYTES,
    SAMPLE_BYTES,
    TensorLocation,
    parse_header,
    read_bytes,
)
from .writing import disk_errors, write_json

OUTLINE_FILE = "outline.json"
"""In the home of a model whose shards are deleted while it is prepared."""

_VERSION = 1
_HEAD_BYTES = 256 << 10
"""Asked for first; most headers are shorter."""

ReadRange = Callable[[str, int, int], bytes]
"""Reads a part of a shard: its name, offset, number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOutline:
    """One shard without its weights.

    Attributes:
        num_bytes: Length of the file.
        header: Text of its safetensors header, with the padding.
        sample_sha256: Hash of its first and last 64 KiB.
    """

    num_bytes: int
    header: str
    sample_sha256: str

    def tensors(self, path: Path) -> dict[str, TensorLocation]:
        """Returns where its tensors are or will be, in the order of the file.

        Raises:
            CheckpointError: It is no safetensors header.
        """
        return parse_header(path, self.num_bytes, self.header.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOutline:
    """All shards of one commit.

    Attributes:
        commit: Which.
        precision: What the model is being prepared for.
        fingerprint: As `CheckpointShards.fingerprint` gives it of the whole files.
        shards: By name.
    """

    commit: str
    precision: Precision
    fingerprint: str
    shards: Mapping[str, ShardOutline] = field(default_factory=dict)

    def headers(self, folder: Path) -> dict[str, dict[str, TensorLocation]]:
        """Returns the tensors of every shard, as `CheckpointShards` takes them.

        Raises:
            CheckpointError: A header cannot be read.
        """
        return {name: shard.tensors(folder / name) for name, shard in self.shards.items()}


def read_outline(root: Path) -> CheckpointOutline | None:
    """Returns what a home holds, `None` where it holds none that can be read."""
    try:
        raw = json.loads((root / OUTLINE_FILE).read_text(encoding="utf-8"))
        if raw.pop("version") != _VERSION:
            return None
        shards = {name: ShardOutline(**fields) for name, fields in raw.pop("shards").items()}
        precision = Precision(raw.pop("precision"))
        return CheckpointOutline(**raw, precision=precision, shards=shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def forget_outline(root: Path) -> None:
    """Deletes what a home holds.

    Raises:
        PrepareError: The file cannot be deleted.
    """
    with disk_errors(root):
        (root / OUTLINE_FILE).unlink(missing_ok=True)


def take_outline(
    root: Path,
    folder: Path,
    commit: str,
    precision: Precision,
    *,
    shard_bytes: Mapping[str, int],
    read_range: ReadRange,
    progress: Progress,
) -> CheckpointOutline:
    """Returns the outline of a commit: the home's, or one that is read now and kept there.

    Args:
        root: The model's home.
        folder: The snapshot.
        commit: Its commit.
        precision: What the model is prepared for.
        shard_bytes: Name and length of every shard.
        read_range: Reads a part of a shard that is not here.
        progress: Reports step `check` in files.

    Raises:
        CheckpointError: A shard is no safetensors file.
        PrepareError: The outline cannot be written.
        MiraError: As `read_range` says.
        CancelledError: Somebody asked to stop.
    """
    kept = read_outline(root)
    if kept is not None and kept.commit == commit and kept.shards.keys() == shard_bytes.keys():
        found = replace(kept, precision=precision)
        if found == kept:
            return kept
    else:
        found = _survey(folder, commit, precision, shard_bytes, read_range, progress)
    write_json(root / OUTLINE_FILE, {"version": _VERSION, **asdict(found)})
    return found


def check_shard(outline: CheckpointOutline, folder: Path, name: str) -> None:
    """Compares a shard that has come with what was read of it before.

    Raises:
        CheckpointError: It is another file, or cannot be read.
    """
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{path} is missing.", hint="Run it again: it is downloaded anew."
        ) from error
    if _outline(path, size, lambda start, num: _local(path, start, num))[0] != outline.shards[name]:
        raise CheckpointError(
            f"{name} is not the file whose beginning the hub sent before.",
            hint="Run it again; what was read before is thrown away.",
        )


def _survey(
    folder: Path,
    commit: str,
    precision: Precision,
    shard_bytes: Mapping[str, int],
    read_range: ReadRange,
    progress: Progress,
) -> CheckpointOutline:
    digest, shards = hashlib.sha256(), {}
    for number, name in enumerate(sorted(shard_bytes, key=lambda each: folder / each)):
        progress.report("check", number, len(shard_bytes), "files", "where each tensor is")
        path, size = folder / name, shard_bytes[name]

        def read(start: int, num_bytes: int, path: Path = path, name: str = name) -> bytes:
            if path.is_file():
                return _local(path, start, num_bytes)
            return read_range(name, start, num_bytes)

        shards[name], ends = _outline(path, size, read)
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(ends)
    return CheckpointOutline(
        commit=commit, precision=precision, fingerprint=digest.hexdigest(), shards=shards
    )


def _local(path: Path, start: int, num_bytes: int) -> bytes:
    return read_bytes(path, start, num_bytes).numpy().tobytes()


def _outline(
    path: Path, size: int, read: Callable[[int, int], bytes]
) -> tuple[ShardOutline, bytes]:
    """Returns a shard's outline and its two ends."""
    head = read(0, min(size, _HEAD_BYTES))
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path.name} is no safetensors file ({size} bytes).",
            hint="Pick another model or revision.",
        )
    if 8 + length > len(head):
        head += read(len(head), 8 + length - len(head))
    raw = head[8 : 8 + length]
    parse_header(path, size, raw)
    sample = min(size, SAMPLE_BYTES)
    ends = head[:sample] + read(size - sample, sample)
    digest = hashlib.sha256(ends).hexdigest()
    return ShardOutline(num_bytes=size, header=raw.decode(), sample_sha256=digest), ends
