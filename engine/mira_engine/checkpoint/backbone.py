"""The backbone: a checkpoint without its experts, as transformers reads it.

A folder with the configuration, tokenizer and templates as they were, and the non-expert
weights under the checkpoint's own keys, so that plain `from_pretrained` loads them. Made
under another name and renamed when whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from itertools import zip_longest
from pathlib import Path

import torch

from ..errors import CheckpointError
from .experts import CheckpointExperts
from .files import BACKBONE_MARKER
from .progress import Progress
from .quantisation import quantisation_of, without_quantisation
from .shards import SINGLE_FILE
from .writing import disk_errors, header_bytes, sync_folder, write_json

BACKBONE_VERSION = 1

UNFINISHED_SUFFIX = ".unfinished"
"""Ends the name of a backbone's folder until it is whole."""

_ACCOUNT_SUFFIX = ".unfinished.json"
"""Ends the name of the account beside that folder."""

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
"""Patterns of the files beside the weights that a model needs."""


def small_files(folder: Path) -> list[Path]:
    """Returns the files beside the weights that a backbone keeps, sorted."""
    found = {path for pattern in SMALL_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def backbone_revision(checkpoint: CheckpointExperts, revision: str) -> str:
    """Returns a fingerprint of all that the backbone holds.

    Args:
        checkpoint: The checkpoint.
        revision: Fingerprint of its weights.
    """
    digest = hashlib.sha256(revision.encode())
    for path in small_files(checkpoint.folder):
        digest.update(path.relative_to(checkpoint.folder).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def is_backbone_current(folder: Path, revision: str) -> bool:
    """Whether the backbone is whole and made from the checkpoint of this fingerprint."""
    try:
        marker = json.loads((folder / BACKBONE_MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (marker.get("version"), marker.get("revision")) == (BACKBONE_VERSION, revision)


class BackboneWriter:
    """Writes a backbone shard by shard; what an earlier run took is kept.

    The file of weights has its full length from the start, with holes where shards are still
    to come, so that shards may come in any order and one after another. An account says which
    of them are in it. It all lies under another name until the backbone is whole.

    Args:
        checkpoint: Where the weights come from; read in pieces of 64 MiB.
        folder: Where the backbone goes; one of another checkpoint is replaced.
        revision: Its fingerprint, from `backbone_revision`.

    Raises:
        CheckpointError: The checkpoint has nothing but experts.
    """

    def __init__(self, checkpoint: CheckpointExperts, folder: Path, *, revision: str) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._revision = revision
        self._unfinished = folder.with_name(folder.name + UNFINISHED_SUFFIX)
        self._account = folder.with_name(folder.name + _ACCOUNT_SUFFIX)
        self._keys: dict[str, list[str]] = {}
        self._kept = kept_keys(checkpoint)
        for key in self._kept:
            self._keys.setdefault(checkpoint.shards.shard_of(key), []).append(key)
        if not self._keys:
            raise CheckpointError(
                f"{checkpoint.folder} holds experts only.", hint="Download the checkpoint again."
            )
        self._is_finished = is_backbone_current(folder, revision)
        self._done = self._earlier_shards()

    def _earlier_shards(self) -> set[str]:
        try:
            found = json.loads(self._account.read_text(encoding="utf-8"))
            if found["state"] == self._state and (self._unfinished / SINGLE_FILE).is_file():
                return set(found["shards"]) & self._keys.keys()
        except (OSError, ValueError, KeyError, TypeError):
            pass  # None there, or one of another program: nothing to take over.
        return set()

    @property
    def _state(self) -> list[object]:
        # Which tensors are in the file depends on whether copies could be told apart.
        header, _, _ = self._layout()
        return [BACKBONE_VERSION, self._revision, hashlib.sha256(header).hexdigest()]

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards with anything of the backbone, in the order of the file."""
        return tuple(self._keys)

    @property
    def done_shards(self) -> frozenset[str]:
        """Those of them whose part is written."""
        return frozenset(self._keys if self._is_finished else self._done)

    def missing_bytes(self, shard: str) -> int:
        """Returns the bytes of weights still to be written of a shard."""
        if shard in self.done_shards:
            return 0
        shards = self._checkpoint.shards
        return sum(shards[key].num_bytes for key in self._keys.get(shard, ()))

    @property
    def small_bytes(self) -> int:
        """Bytes of the files beside the weights that are still to be written."""
        if self._is_finished:
            return 0
        return sum(path.stat().st_size for path in small_files(self._checkpoint.folder))

    def write(self, shard: str, progress: Progress) -> None:
        """Writes a shard's part, unless it is there.

        Args:
            shard: Its name; the file must be here.
            progress: Reports `bytes` of weights.

        Raises:
            CheckpointError: The shard cannot be read.
            DiskSpaceError: The disk is full.
            CancelledError: Somebody asked to stop.
        """
        if shard in self.done_shards or shard not in self._keys:
            return
        shards = self._checkpoint.shards
        header, offsets, end = self._layout()
        if not self._done:
            self._begin(header, end)
        done = len(header) + sum(
            shards[key].num_bytes for name in self._done for key in self._keys[name]
        )
        path = self._unfinished / SINGLE_FILE
        with disk_errors(path), path.open("r+b", buffering=0) as file:
            for key in self._keys[shard]:
                file.seek(offsets[key])
                for piece in shards.pieces(key):
                    view = memoryview(piece.numpy())
                    done += len(view)
                    while view:
                        view = view[file.write(view) :]
                    progress.report("backbone", done, end, "bytes", "all but the experts")
            os.fsync(file.fileno())
        self._done.add(shard)
        self._write_account()

    def _layout(self) -> tuple[bytes, dict[str, int], int]:
        """Returns the file's header, where each tensor begins, and its length."""
        shards, keys = self._checkpoint.shards, self._kept
        header = header_bytes({key: (shards[key].dtype, shards[key].shape) for key in keys})
        offsets, end = {}, len(header)
        for key in keys:
            offsets[key] = end
            end += shards[key].num_bytes
        return header, offsets, end

    def _begin(self, header: bytes, num_bytes: int) -> None:
        with disk_errors(self._unfinished):
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
            with (self._unfinished / SINGLE_FILE).open("wb") as file:
                file.write(header)
                file.truncate(num_bytes)

    def _write_account(self) -> None:
        write_json(self._account, {"state": self._state, "shards": sorted(self._done)})

    def finish(self) -> None:
        """Adds the small files and gives the backbone its name, unless it has it.

        Raises:
            DiskSpaceError: The disk is full.
            PrepareError: A file cannot be written.
        """
        if self._is_finished:
            self._account.unlink(missing_ok=True)
            return
        assert self._done == self._keys.keys()
        source, made = self._checkpoint.folder, self._unfinished
        with disk_errors(self._folder):
            for path in small_files(source):
                target = made / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        _describe_as_float(made / "config.json")
        marker = {"version": BACKBONE_VERSION, "revision": self._revision}
        write_json(made / BACKBONE_MARKER, marker)
        with disk_errors(self._folder):
            if self._folder.exists():
                shutil.rmtree(self._folder)
            made.replace(self._folder)
            sync_folder(self._folder.parent)
            # Last: a run that is killed before still knows what the shards that are gone gave.
            self._account.unlink(missing_ok=True)
        self._is_finished = True


def _describe_as_float(path: Path) -> None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    if quantisation_of(fields) is not None:
        write_json(path, without_quantisation(fields))


def kept_keys(checkpoint: CheckpointExperts) -> list[str]:
    """Returns the tensors that the backbone has: all but the experts and bare copies.

    A tensor that only repeats the one it is tied to is left out, for transformers ties them.
    One with other values stays: the configuration is wrong, and transformers does not tie.
    Where shards come one after another nobody can compare, and both stay.
    """
    keys = checkpoint.backbone_keys
    if checkpoint.shards.may_be_absent:
        return keys
    return [key for key in keys if not _is_copy(checkpoint, key)]


def _is_copy(checkpoint: CheckpointExperts, key: str) -> bool:
    original = checkpoint.tied_keys.get(key)
    if original is None:
        return False
    shards = checkpoint.shards
    if (shards[key].dtype, shards[key].shape) != (shards[original].dtype, shards[original].shape):
        return False
    pairs = zip_longest(shards.pieces(key), shards.pieces(original))
    return all(torch.equal(piece, other) for piece, other in pairs)


def write_backbone(writer: BackboneWriter, progress: Progress) -> None:
    """Writes all of a backbone that is missing; every shard must be here.

    Raises:
        CheckpointError: A shard cannot be read.
        DiskSpaceError: The disk is full.
        CancelledError: Somebody asked to stop.
    """
    for shard in writer.shards:
        writer.write(shard, progress)
    writer.finish()
