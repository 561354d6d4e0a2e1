"""GPTQModel's algorithm for one matrix, as a function.

Only its core class is used: its loader replaces transformers' own classes in the process.
Imported by the process that quantises alone, because importing the library starts thread
pools and takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from gptqmodel.quantization import GPTQ, QuantizeConfig
from torch import Tensor, nn

from .gptq_calibrated import MatrixCodes, MatrixQuantiser

_BITS = 4
_NO_INVERSE = 1.0
"""What the library gives as the damping where no damping made the Hessian invertible."""


def make_quantiser(group_size: int) -> MatrixQuantiser:
    """Returns the quantiser of matrices in groups of `group_size` inputs, symmetric."""
    config = QuantizeConfig(
        bits=_BITS, group_size=group_size, sym=True, desc_act=False, offload_to_disk=False
    )

    def quantise(weight: Tensor, batches: Iterable[Tensor]) -> MatrixCodes | None:
        num_outputs, num_inputs = weight.shape
        layer = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        task = GPTQ(layer, config)
        task.quantizer.configure(perchannel=True)
        task.fallback = None  # Ours is counted, and rounds as the format does.
        for batch in batches:
            task.add_batch(batch, None)
        try:
            values, scales, _, _, _, _, damping, _ = task.quantize()
        except ValueError:  # The losses are nan.
            return None
        is_finite = bool(torch.isfinite(values).all() and torch.isfinite(scales).all())
        if damping >= _NO_INVERSE or not is_finite:
            return None
        scales = scales.to(torch.float32)
        codes = torch.round(values / scales.repeat_interleave(group_size, dim=1))
        return MatrixCodes(codes.clamp(-8, 7).to(torch.int8), scales)

    return quantise
