"""Codes that a GPTQ checkpoint of the same model holds already.

Copied as they are; nothing is calibrated. Runs in the thread that asked.
"""

from __future__ import annotations

import torch

from ..errors import UnsupportedModelError
from .expert import ExpertTensors
from .experts import CheckpointExperts
from .gptq_checkpoint import GptqExperts
from .quantised_expert import QuantisedExpert

_MAX_ERROR = 0.3
"""Relative error of INT4 codes to the weights that they were made from: .05 to .15 in use. Codes of
another model's weights err by more than 1."""


class GivenCodes:
    """Chooses what the GPTQ checkpoint says.

    Args:
        checkpoint: The model's float weights.
        given: The GPTQ checkpoint.

    Raises:
        UnsupportedModelError: They are not of one model.
        CheckpointError: A tensor cannot be read.
    """

    def __init__(self, checkpoint: CheckpointExperts, given: GptqExperts) -> None:
        own, other = (
            (len(each.modules), each.num_experts, each.shape) for each in (checkpoint, given)
        )
        if own != other:
            raise _not_of_it(given, "other layers, experts or sizes")
        weight, codes = checkpoint.load(0, 0).up.to(torch.float32), given.load_float(0, 0).up
        if float((codes - weight).norm()) > _MAX_ERROR * float(weight.norm()):
            raise _not_of_it(given, "other weights")
        self._given = given

    def choose(self, layer: int, expert: int, tensors: ExpertTensors) -> QuantisedExpert:
        """Returns the codes of one expert."""
        return self._given.load(layer, expert)


def _not_of_it(given: GptqExperts, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{given.folder} is no GPTQ form of this model: it has {what}.",
        hint="Give the folder of the same model's GPTQ checkpoint.",
    )
