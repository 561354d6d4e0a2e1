"""Turns a checkpoint's experts into an expert store, one expert at a time.

Memory holds one expert's tensors and records, whatever the model's size. Finished layers
are kept when the work stops, and never written twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

from ..types import Plane, Precision
from .experts import CheckpointExperts
from .formats import ExpertFormat, make_format
from .progress import Progress
from .store import StoreManifest, StoreWriter


def checkpoint_revision(checkpoint: CheckpointExperts) -> str:
    """Returns a fingerprint of the weights and their configuration, 64 hexadecimal digits."""
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    digest.update(checkpoint.shards.fingerprint().encode())
    return digest.hexdigest()


def planned_manifest(
    checkpoint: CheckpointExperts, precision: Precision, *, source: str, revision: str
) -> StoreManifest:
    """Describes the store that a checkpoint's experts make, rounded to nearest.

    Raises:
        FormatError: The format cannot hold these experts.
    """
    return StoreManifest.of_format(
        make_format(precision, checkpoint.shape),
        num_layers=len(checkpoint.modules),
        num_experts=checkpoint.num_experts,
        source=source,
        revision=revision,
    )


def convert_experts(
    checkpoint: CheckpointExperts, writer: StoreWriter, precision: Precision, progress: Progress
) -> None:
    """Writes the layers that are missing, then the manifest.

    Args:
        checkpoint: Where the experts come from.
        writer: Where they go.
        precision: Format of the store.
        progress: Reports `bytes` of records after each expert.

    Raises:
        CheckpointError: A shard cannot be read.
        FormatError: An expert cannot be held in the format.
        DiskSpaceError: The disk is full; finished layers are kept.
        CancelledError: Somebody asked to stop; finished layers are kept.
    """
    if writer.is_finished:
        return
    for layer in range(len(checkpoint.modules)):
        convert_layer(checkpoint, writer, precision, layer, progress, num_before=layer)
    writer.finish()


def convert_layer(
    checkpoint: CheckpointExperts,
    writer: StoreWriter,
    precision: Precision,
    layer: int,
    progress: Progress,
    *,
    num_before: int,
) -> None:
    """Writes one layer, unless it is there.

    Args:
        checkpoint: Where the experts come from; only this layer's shards are read.
        writer: Where they go.
        precision: Format of the store.
        layer: Which.
        progress: Reports `bytes` of records after each expert.
        num_before: Layers that were converted before it, for the report.

    Raises:
        MiraError: As `convert_experts` says.
    """
    if not writer.is_layer_done(layer):
        fmt = make_format(precision, checkpoint.shape)
        writer.write_layer(layer, _records(checkpoint, fmt, layer, progress, num_before))


def _records(
    checkpoint: CheckpointExperts,
    fmt: ExpertFormat,
    layer: int,
    progress: Progress,
    num_before: int,
) -> Iterator[Mapping[Plane, torch.Tensor]]:
    expert_bytes = sum(fmt.record_bytes(plane) for plane in fmt.planes)
    num_layers, num_experts = len(checkpoint.modules), checkpoint.num_experts
    for expert in range(num_experts):
        done = (num_before * num_experts + expert) * expert_bytes
        detail = f"{fmt.precision.value}, layer {layer + 1} of {num_layers}"
        progress.report("convert", done, num_layers * num_experts * expert_bytes, "bytes", detail)
        yield fmt.encode(checkpoint.load(layer, expert))
