"""What a model's precisions are compared with, and its experts where no store has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.convert import checkpoint_revision
from ..checkpoint.experts import CheckpointExperts
from ..checkpoint.formats import ExpertTensors, make_format
from ..checkpoint.store import ExpertStore
from ..errors import MiraError
from ..library import ModelHome
from ..model.loader import load_backbone
from ..types import ComputeDtype, Plane, Precision
from .scoring import CheckpointScorer

NEAREST_FIRST = (
    Precision.FLOAT32, Precision.BF16, Precision.NESTED, Precision.INT8, Precision.INT4,
)  # fmt: skip
"""Precisions from the one that keeps most of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the precisions are compared with.

    Attributes:
        precision: Format of its experts.
        label: For people.
        checkpoint: Where its experts are, `None` where they are in a store.
        note: Why it is not the experts in bfloat16; empty where it is.
    """

    precision: Precision
    label: str
    checkpoint: CheckpointExperts | None = None
    note: str = ""


def choose_reference(home: ModelHome) -> Reference:
    """Returns the model's experts in bfloat16, or what comes nearest to them.

    Args:
        home: A model that is ready in some precision.

    Raises:
        StoreError: The store of the nearest precision is damaged.
    """
    if home.is_ready(Precision.BF16):
        return Reference(precision=Precision.BF16, label="bf16 experts of the prepared store")
    best = next(precision for precision in NEAREST_FIRST if home.is_ready(precision))
    manifest = ExpertStore.open(home.store_dir(best)).manifest
    why = "The checkpoint has other weights than what was prepared"
    try:
        checkpoint = CheckpointExperts(home.checkpoint_dir)
        if checkpoint_revision(checkpoint) == manifest.revision:
            return Reference(
                precision=Precision.BF16,
                label="bf16 experts, read from the checkpoint",
                checkpoint=checkpoint,
            )
    except MiraError as error:
        is_gone = not (home.checkpoint_dir / "config.json").exists()
        why = "The checkpoint is gone" if is_gone else error.message.rstrip(".")
    return Reference(
        precision=best,
        label=f"{best} experts of the prepared store",
        note=f"{why}: compared with {best}, the nearest precision that is prepared.",
    )


def open_checkpoint(
    home: ModelHome,
    checkpoint: CheckpointExperts,
    dtype: ComputeDtype,
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> CheckpointScorer:
    """Loads a model's backbone, to predict with the checkpoint's experts in bfloat16."""
    model = load_backbone(home.backbone_dir, dtype)
    return CheckpointScorer(
        model,
        lambda layer, expert: rounded(checkpoint.load(layer, expert)),
        is_cancelled=is_cancelled,
    )


def rounded(tensors: ExpertTensors) -> ExpertTensors:
    """Returns an expert as a `bf16` store holds it."""

    def narrow(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(torch.bfloat16)

    return ExpertTensors(
        up=tensors.up.to(torch.bfloat16),
        down=tensors.down.to(torch.bfloat16),
        up_bias=narrow(tensors.up_bias),
        down_bias=narrow(tensors.down_bias),
    )


def expert_bytes(home: ModelHome, precision: Precision, reference: Reference) -> int:
    """Returns the bytes of one expert's records in a precision, or in the reference's."""
    checkpoint = reference.checkpoint
    if checkpoint is not None and precision is reference.precision:
        return make_format(precision, checkpoint.shape).record_bytes(Plane.WHOLE)
    return sum(ExpertStore.open(home.store_dir(precision)).manifest.planes.values())
