"""One expert on the processor: two products, and between them what its module says.

Any thread.
"""

from __future__ import annotations

import torch
from mira_kernels.dispatch import linear
from torch import Tensor

from ..checkpoint.formats import BoundExpert


def expert_output(module: torch.nn.Module, rows: Tensor, weights: BoundExpert) -> Tensor:
    """Computes an expert for its tokens.

    Args:
        module: transformers' experts module; supplies what lies between the matrices.
        rows: `[N, C]` on the CPU.
        weights: Of the expert.

    Returns:
        `[N, C]` in the dtype of `rows`.
    """
    inner = linear(rows, weights.up, weights.up_bias)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    result = linear(inner, weights.down, weights.down_bias)
    return module.post_expert_norm(result) if module.has_post_expert_norm else result
