"""What is to be made of a checkpoint: the backbone and every store that a precision takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..library import ModelHome
from ..types import ExpertShape, Precision, Rounding
from . import gptq_store
from .backbone import BackboneWriter, backbone_revision, write_backbone
from .convert import checkpoint_revision, convert_experts, planned_manifest
from .experts import CheckpointExperts
from .formats import make_format
from .progress import Progress
from .store import StoreWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWork:
    """Everything that writes, with what earlier runs finished of it.

    Attributes:
        checkpoint: Where it all comes from.
        backbone: Writes all but the experts.
        writers: Write the experts, by the precision of their store.
        given_up: Whose stores with codes by GPTQ go once the others are whole.
    """

    checkpoint: CheckpointExperts
    backbone: BackboneWriter
    writers: Mapping[Precision, StoreWriter]
    home: ModelHome
    given_up: tuple[Precision, ...] = ()

    @classmethod
    def of_home(
        cls,
        home: ModelHome,
        checkpoint: CheckpointExperts,
        precision: Precision,
        draft: Rounding | None = None,
    ) -> CheckpointWork:
        """Opens the writers of a home, whose lock is held.

        A store whose draft's codes GPTQ has chosen from these weights stays, unless `draft` is
        `NEAREST`; one of other weights goes.

        Raises:
            FormatError: A format cannot hold these experts.
            PrepareError: A folder cannot be written.
        """
        revision = checkpoint_revision(checkpoint)
        writers, given_up = {}, []
        for each in home.needed_precisions(precision):
            planned = planned_manifest(checkpoint, each, source=home.title, revision=revision)
            found = gptq_store.finished_manifest(home, each, planned)
            if found is not None and draft is not Rounding.NEAREST:
                gptq_store.drop_store(home.nearest_store_dir(each))  # A kill may have left it.
                continue
            writers[each] = StoreWriter(home.nearest_store_dir(each), planned)
            # Only when the other one is whole: the disk may have no room for it.
            if draft is Rounding.NEAREST or home.gptq_store_dir(each).exists():
                given_up.append(each)
        return cls(
            checkpoint=checkpoint,
            backbone=BackboneWriter(
                checkpoint, home.backbone_dir, revision=backbone_revision(checkpoint, revision)
            ),
            writers=writers,
            home=home,
            given_up=tuple(given_up),
        )

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be written."""
        backbone = self.backbone
        weights = sum(backbone.missing_bytes(shard) for shard in backbone.shards)
        stores = sum(writer.missing_bytes for writer in self.writers.values())
        return weights + backbone.small_bytes + stores

    def run(self, progress: Progress) -> None:
        """Writes what is missing, one store after another; every shard must be here.

        Raises:
            CheckpointError: A shard cannot be read.
            FormatError: An expert cannot be held in a format.
            DiskSpaceError: The disk is full; what is finished is kept.
            CancelledError: Somebody asked to stop; what is finished is kept.
        """
        write_backbone(self.backbone, progress)
        for precision, writer in self.writers.items():
            convert_experts(self.checkpoint, writer, precision, progress)
        self.give_up_drafts()

    def give_up_drafts(self) -> None:
        """Deletes stores that were in use until now and are not wanted any more.

        Raises:
            PrepareError: One cannot be deleted.
        """
        for precision in self.given_up:
            gptq_store.give_up(self.home, precision)


def refuse_formats(home: ModelHome, shape: ExpertShape, precision: Precision) -> None:
    """Refuses experts that a needed format cannot hold, before anything is written.

    Raises:
        FormatError: One cannot.
    """
    for needed in home.needed_precisions(precision):
        make_format(needed, shape)
