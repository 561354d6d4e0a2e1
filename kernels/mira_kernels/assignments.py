"""A layer's routing as the GPU kernels read it: assignments sorted by expert, cut into tiles.

Made by torch's own operators where the routing is; nothing here waits for the host. Any
thread, one stream.

Source: Specter, fused multi-expert INT4 draft (routing read from device memory).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tiles import BLOCK_M


@dataclass(frozen=True, slots=True, eq=False)
class Assignments:
    """A layer's routing, grouped by expert; all of it stays on the device.

    Attributes:
        top_k: Experts of a token.
        order: int32 `[T * k]`: assignments sorted by expert, each `token * k + place`.
        block_expert: int32 `[B]`: expert of each tile of rows, -1 behind the last.
        block_start: int32 `[B]`: its first row in `order`.
        expert_stop: int32 `[num_experts]`: where each expert's rows end.
    """

    top_k: int
    order: Tensor
    block_expert: Tensor
    block_start: Tensor
    expert_stop: Tensor

    @property
    def num_rows(self) -> int:
        """Assignments."""
        return self.order.shape[0]


def group_by_expert(top_k_index: Tensor, num_experts: int) -> Assignments:
    """Sorts a layer's routing by expert, without a word to the host.

    Args:
        top_k_index: `[T, k]` integers.
        num_experts: Experts of the layer.
    """
    num_tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    num_rows = num_tokens * top_k
    _, order = torch.sort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    stop = torch.cumsum(counts, 0)
    num_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    block_stop = torch.cumsum(num_blocks, 0)
    # As many tiles as there could be: each expert's last one may be short.
    most = num_rows // BLOCK_M + min(num_rows, num_experts)
    blocks = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(block_stop, blocks, right=True)
    is_none = expert >= num_experts
    known = expert.clamp(max=num_experts - 1)
    within = blocks - (block_stop - num_blocks)[known]
    start = (stop - counts)[known] + within * BLOCK_M
    return Assignments(
        top_k,
        order.int(),
        # Not `where`: with a number it may bring that from the host, which no recording can.
        expert.masked_fill(is_none, -1).int(),
        start.masked_fill(is_none, 0).int(),
        stop.int(),
    )
