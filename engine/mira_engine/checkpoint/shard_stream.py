"""Turns a checkpoint into backbone and stores shard by shard, and deletes each used-up one.

One loop over the steps of `schedule`: bring the shards of the next layer, take the
backbone's part of them, convert the layer into every store, delete what nothing later
needs. A shard goes only after what it gave is on the disk and on an account, so that a
run which is killed at any moment goes on without the shards that are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ..types import Precision
from .backbone import BackboneWriter
from .convert import convert_layer
from .experts import CheckpointExperts
from .progress import Progress
from .schedule import ShardStep, SpaceNeed, shard_steps, space_need
from .store import StoreWriter


class ShardSource(Protocol):
    """Where shards come from and how they go."""

    @property
    def shard_bytes(self) -> Mapping[str, int]:
        """Name and length of every shard."""

    def here_bytes(self, name: str) -> int:
        """Returns how much of a shard is on the disk."""

    def bring(self, names: Sequence[str], left: Collection[str], progress: Progress) -> None:
        """Has shards on the disk, checked.

        Args:
            names: Which.
            left: These and all that are needed later.
            progress: Reports step `download` in bytes of all shards.
        """

    def drop(self, name: str) -> None:
        """Deletes a shard; one that is not here is no mistake."""


class ShardStream:
    """One run over what is left to be made of a checkpoint.

    Args:
        checkpoint: Where experts come from; its shards need not be here.
        backbone: Takes the rest of the weights.
        writers: Take the experts, by the precision of their store.
        layer_shards: For each MoE layer the shards with its experts.
        source: Brings and drops shards.
        is_dropping: Whether used-up shards are deleted.
    """

    def __init__(
        self,
        checkpoint: CheckpointExperts,
        backbone: BackboneWriter,
        writers: Mapping[Precision, StoreWriter],
        *,
        layer_shards: Sequence[Collection[str]],
        source: ShardSource,
        is_dropping: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._backbone = backbone
        self._writers = writers
        self._layer_shards = layer_shards
        self._source = source
        self._is_dropping = is_dropping

    def drop_idle(self) -> None:
        """Deletes what an earlier run used up and did not come to delete."""
        needed = {name for step in self._steps() for name in step.shards}
        self._drop(name for name in self._source.shard_bytes if name not in needed)

    def need(self) -> SpaceNeed:
        """Returns by how much the disk will fill up, from how it is now."""
        names, layers = self._source.shard_bytes, range(len(self._layer_shards))
        need = space_need(
            self._steps(),
            shard_bytes=names,
            backbone_bytes={name: self._backbone.missing_bytes(name) for name in names},
            layer_bytes={layer: self._missing_bytes(layer) for layer in layers},
            here_bytes={name: self._source.here_bytes(name) for name in names},
            is_dropping=self._is_dropping,
        )
        small = self._backbone.small_bytes
        return SpaceNeed(
            weights_bytes=need.weights_bytes,
            made_bytes=need.made_bytes + small,
            whole_bytes=need.whole_bytes + small,
        )

    def run(self, progress: Progress) -> None:
        """Makes everything that is missing, the manifests last.

        Raises:
            CheckpointError: A shard cannot be read, or is another than it was.
            FormatError: An expert cannot be held in a format.
            HubError: A shard cannot be downloaded.
            DiskSpaceError: The disk is full; what is finished is kept.
            CancelledError: Somebody asked to stop; what is finished is kept.
        """
        steps = self._steps()
        for number, step in enumerate(steps):
            left = {name for later in steps[number:] for name in later.shards}
            self._source.bring(step.shards, left, progress)
            for name in step.shards:
                self._backbone.write(name, progress)
            if step.layer is not None:
                self._convert(step.layer, progress)
            self._drop(step.dropped)
        self._backbone.finish()
        for writer in self._writers.values():
            if not writer.is_finished:
                writer.finish()

    def _steps(self) -> tuple[ShardStep, ...]:
        layers = range(len(self._layer_shards))
        return shard_steps(
            self._layer_shards,
            self._backbone.shards,
            done_layers={layer for layer in layers if not self._missing_bytes(layer)},
            done_shards=self._backbone.done_shards,
        )

    def _missing_bytes(self, layer: int) -> int:
        writers = self._writers.values()
        return sum(each.layer_bytes for each in writers if not each.is_layer_done(layer))

    def _convert(self, layer: int, progress: Progress) -> None:
        layers = range(len(self._layer_shards))
        for precision, writer in self._writers.items():
            num_before = sum(writer.is_layer_done(each) for each in layers)
            convert_layer(
                self._checkpoint, writer, precision, layer, progress, num_before=num_before
            )

    def _drop(self, names: Iterable[str]) -> None:
        if self._is_dropping:
            for name in names:
                self._source.drop(name)
