"""A store whose draft's codes somebody has chosen, made without GPTQ."""

from __future__ import annotations

import torch
from mira_engine.checkpoint import gptq_store
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.formats import ExpertTensors
from mira_engine.checkpoint.progress import Progress
from mira_engine.checkpoint.quantised_expert import QuantisedExpert
from mira_engine.checkpoint.store import StoreManifest, StoreWriter
from mira_engine.library import ModelHome


class FakeChooser:
    """Gives every matrix codes that tell the expert; refuses those in `refused`."""

    def __init__(self, group_size: int = 32, refused=()) -> None:
        self.group_size = group_size
        self.refused = set(refused)
        self.asked: list[tuple[int, int]] = []

    def choose(self, layer: int, expert: int, tensors: ExpertTensors) -> QuantisedExpert | None:
        self.asked.append((layer, expert))
        if (layer, expert) in self.refused:
            return None
        parts = {}
        for name in ("up", "down"):
            matrix = getattr(tensors, name)
            parts[f"{name}_codes"] = torch.full(matrix.shape, expert % 8, dtype=torch.int8)
            parts[f"{name}_scales"] = torch.ones(
                matrix.shape[0], matrix.shape[1] // self.group_size
            )
        return QuantisedExpert(
            group_size=self.group_size,
            up_bias=tensors.up_bias,
            down_bias=tensors.down_bias,
            **parts,
        )


def write_chosen(
    home: ModelHome,
    checkpoint: CheckpointExperts,
    planned: StoreManifest,
    chooser: FakeChooser,
    progress: Progress | None = None,
    *,
    calibration: str = "some prompts",
) -> StoreWriter:
    """Writes the store beside the one in use; it is not put in place."""
    folder = gptq_store.unfinished_dir(home, planned.precision)
    writer = StoreWriter(folder, gptq_store.chosen_manifest(planned, calibration))
    gptq_store.write_store(checkpoint, writer, planned.precision, chooser, progress or Progress())
    return writer
