"""Dense layers of the backbone in bfloat16, and cheaper copies of them for the draft.

A step with few tokens reads every dense weight once and does little with it: what counts
is reading at the memory's rate, and reading less. `NativeLinear` is transformers' own
linear module with the product of `mira_kernels.native`; the weights stay where they are.
While a draft runs, a layer that has a copy in INT8 multiplies with that instead: the
draft only proposes, so this costs acceptance and never changes an answer.
"""

from __future__ import annotations

import torch
from mira_kernels import native
from torch import nn

from ..types import DraftDense


class DenseSwitch:
    """Whether the layers of one model multiply with their draft copies now."""

    __slots__ = ("is_drafting",)

    def __init__(self) -> None:
        self.is_drafting = False


class NativeLinear(nn.Linear):
    """A linear layer whose product is the native kernel's; bfloat16 on the CPU.

    Never constructed: `use_native_linear` turns a layer into one in place.
    """

    switch: DenseSwitch
    draft_codes: torch.Tensor | None
    draft_scales: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns `[..., N]` for `[..., K]`."""
        if self.draft_codes is not None and self.switch.is_drafting:
            return torch.ops.mira.int8_linear(input, self.draft_codes, self.draft_scales, self.bias)
        return torch.ops.mira.dense_linear(input, self.weight, self.bias)


def use_native_linear(model: nn.Module, switch: DenseSwitch) -> int:
    """Turns every bfloat16 linear layer of the model into a `NativeLinear`.

    Args:
        model: Its parameters stay the same objects under the same names.
        switch: Shared by all layers.

    Returns:
        How many layers were turned; 0 where the native kernels are not loaded.
    """
    if not native.is_loaded():
        return 0
    num_turned = 0
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype is torch.bfloat16:
            module.__class__ = NativeLinear
            module.switch = switch
            module.draft_codes = module.draft_scales = None
            num_turned += 1
    return num_turned


def draft_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the dense layers that a draft may have copies of, by name.

    Every linear layer of the backbone: attention, shared experts, dense layers, output.
    Layers of fewer than 2^16 weights are not worth a copy.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.numel() >= 2**16
    }


def draft_copy_bytes(model: nn.Module, kind: DraftDense) -> int:
    """Returns the bytes of all copies of this kind."""
    if kind is DraftDense.TARGET:
        return 0
    return sum(_copy_bytes(layer) for layer in draft_layers(model).values())


def _copy_bytes(layer: nn.Linear) -> int:
    return layer.weight.numel() + 4 * layer.out_features


def add_draft_copies(model: nn.Module, kind: DraftDense) -> int:
    """Makes the copies; layers must be `NativeLinear`. Returns their bytes."""
    if kind is DraftDense.TARGET:
        return 0
    num_bytes = 0
    for layer in draft_layers(model).values():
        if not isinstance(layer, NativeLinear):
            continue
        codes, scales = quantise_rows(layer.weight)
        del layer.draft_codes, layer.draft_scales
        layer.register_buffer("draft_codes", codes, persistent=False)
        layer.register_buffer("draft_scales", scales, persistent=False)
        num_bytes += codes.nbytes + scales.nbytes
    return num_bytes


@torch.no_grad()
def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises `[N, K]` to INT8 by rows: codes `[N, K]` int8, scales `[N]` float32.

    In blocks of rows, so that no second whole matrix is held.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], 1024):
        block = weight[start : start + 1024].float()
        scale = block.abs().amax(1).clamp_min_(1e-8) / 127
        scales[start : start + 1024] = scale
        codes[start : start + 1024] = (block / scale[:, None]).round_()
    return codes, scales
