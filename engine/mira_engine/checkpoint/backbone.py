"""The backbone: a checkpoint without its experts, as transformers reads it.

A folder with the configuration, tokenizer and templates as they were, and the non-expert
weights under the checkpoint's own keys, so that plain `from_pretrained` loads them. Weights
that were quantised are float here, and the configuration says nothing of how they were
stored. Made under another name and renamed when whole.
"""

from __future__ import annotations

import hashlib
import json
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
from .writing import TensorFileWriter, disk_errors, partial_path, write_json

BACKBONE_VERSION = 1

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


def backbone_bytes(checkpoint: CheckpointExperts) -> int:
    """Returns the bytes of the backbone's weights and small files, headers left out."""
    weights = sum(checkpoint.shards[key].num_bytes for key in checkpoint.backbone_keys)
    return weights + sum(path.stat().st_size for path in small_files(checkpoint.folder))


def is_backbone_current(folder: Path, revision: str) -> bool:
    """Whether the backbone is whole and made from the checkpoint of this fingerprint."""
    try:
        marker = json.loads((folder / BACKBONE_MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (marker.get("version"), marker.get("revision")) == (BACKBONE_VERSION, revision)


def write_backbone(
    checkpoint: CheckpointExperts, folder: Path, *, revision: str, progress: Progress
) -> None:
    """Writes the backbone unless it is there; replaces one of another checkpoint.

    Args:
        checkpoint: Where the weights come from; read in pieces of 64 MiB.
        folder: Where the backbone goes.
        revision: Its fingerprint, from `backbone_revision`.
        progress: Reports `bytes` of weights.

    Raises:
        CheckpointError: A shard cannot be read.
        DiskSpaceError: The disk is full.
        CancelledError: Somebody asked to stop.
    """
    if is_backbone_current(folder, revision):
        return
    partial = partial_path(folder)
    with disk_errors(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        _write_weights(checkpoint, partial / SINGLE_FILE, progress)
        with disk_errors(folder):
            for path in small_files(checkpoint.folder):
                target = partial / path.relative_to(checkpoint.folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        _describe_as_float(partial / "config.json")
        write_json(partial / BACKBONE_MARKER, {"version": BACKBONE_VERSION, "revision": revision})
        with disk_errors(folder):
            if folder.exists():
                shutil.rmtree(folder)
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _describe_as_float(path: Path) -> None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    if quantisation_of(fields) is not None:
        write_json(path, without_quantisation(fields))


def _write_weights(checkpoint: CheckpointExperts, path: Path, progress: Progress) -> None:
    shards = checkpoint.shards
    specs = {key: (shards[key].dtype, shards[key].shape) for key in kept_keys(checkpoint)}
    if not specs:
        raise CheckpointError(
            f"{checkpoint.folder} holds experts only.", hint="Download the checkpoint again."
        )
    with TensorFileWriter(path, specs) as writer:
        for key in specs:
            for piece in shards.pieces(key):
                writer.append(piece)
                progress.report(
                    "backbone", writer.num_bytes, writer.total_bytes, "bytes", "all but the experts"
                )


def kept_keys(checkpoint: CheckpointExperts) -> list[str]:
    """Returns the tensors that the backbone has: all but the experts and bare copies.

    A tensor that only repeats the one it is tied to is left out, for transformers ties them.
    One with other values stays: the configuration is wrong, and transformers does not tie.
    """
    return [key for key in checkpoint.backbone_keys if not _is_copy(checkpoint, key)]


def _is_copy(checkpoint: CheckpointExperts, key: str) -> bool:
    original = checkpoint.tied_keys.get(key)
    if original is None:
        return False
    shards = checkpoint.shards
    if not (shards[key].path.exists() and shards[original].path.exists()):
        return False  # Where shards come one after another, both are kept and told apart later.
    if (shards[key].dtype, shards[key].shape) != (shards[original].dtype, shards[original].shape):
        return False
    pairs = zip_longest(shards.pieces(key), shards.pieces(original))
    return all(torch.equal(piece, other) for piece, other in pairs)
