"""Finds each MoE layer's router and the norm in front of it in a loaded model.

Families put them under different names; a router is known by its shape, a norm by the
usual names. What is found is a proposal: whoever uses it checks it against recorded
routing.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.experts import expert_modules_of
from ..predictor.baselines import RouterWeights

_NORM_NAMES = (
    "pre_feedforward_layernorm_2",
    "pre_feedforward_layernorm",
    "pre_ff_layernorm",
    "post_attention_layernorm",
    "ffn_norm",
    "norm",
)


@torch.no_grad()
def find_routers(model: PreTrainedModel) -> tuple[RouterWeights | None, ...]:
    """Returns every MoE layer's router, `None` where none has the expected shape."""
    modules = dict(model.named_modules())
    routers = []
    for name, experts in expert_modules_of(model):
        block_name, _, _ = name.rpartition(".")
        layer_name, _, _ = block_name.rpartition(".")
        block = modules[block_name]
        found = _router_in(block, experts)
        if found is not None:
            # Where the experts stand in the layer itself, so does the norm before them.
            owner = block if hasattr(block, "self_attn") else modules[layer_name]
            found = _with_norms(found, owner, block)
        routers.append(found)
    return tuple(routers)


def _with_norms(router: RouterWeights, owner: nn.Module, block: nn.Module) -> RouterWeights:
    """Adds the norm before the experts, and folds in what a router does to its own input.

    A router that norms the residual stream by itself sees other factors by channel than the
    experts; their ratio goes into its weights, so that it scores the experts' input.
    """
    gain, own = _input_gain(owner, router.weight.shape[1]), _own_gain(block)
    weight = router.weight
    if own is not None and gain is not None:
        weight = weight * own / gain
    return RouterWeights(weight=weight, bias=router.bias, input_gain=gain)


def _own_gain(block: nn.Module) -> torch.Tensor | None:
    """Measures the factor by channel of a router's own norm and scale; `None` without."""
    router = getattr(block, "router", None)
    norm, projection = getattr(router, "norm", None), getattr(router, "proj", None)
    if norm is None or not isinstance(projection, nn.Linear):
        return None
    signs = _alternating_signs(projection.in_features, projection.weight.dtype)
    seen: list[torch.Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        router(signs)
    finally:
        handle.remove()
    return (seen[0].float() * signs.float())[0]


def _router_in(block: nn.Module, experts: nn.Module) -> RouterWeights | None:
    num_experts = int(experts.num_experts)
    width = _input_width(experts)
    for name, module in block.named_modules():
        is_named = "gate" in name.split(".")[0] or "router" in name.split(".")[0]
        weight = getattr(module, "weight", None)
        if not is_named or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            continue
        if weight.shape[0] != num_experts or (width is not None and weight.shape[1] != width):
            continue
        bias = getattr(module, "bias", None)
        has_bias = isinstance(bias, torch.Tensor) and tuple(bias.shape) == (num_experts,)
        return RouterWeights(
            weight=weight.detach().float().clone(),
            bias=bias.detach().float().clone() if has_bias else torch.zeros(num_experts),
            input_gain=None,
        )
    return None


def _input_width(experts: nn.Module) -> int | None:
    """Returns the width of the experts' input where the module says it."""
    for name in ("hidden_dim", "hidden_size"):
        value = getattr(experts, name, None)
        if isinstance(value, int):
            return value
    return None


def _input_gain(layer: nn.Module, width: int) -> torch.Tensor | None:
    """Measures the factor by channel of the norm before the experts, whatever its parameters."""
    for name in _NORM_NAMES:
        norm = getattr(layer, name, None)
        weight = getattr(norm, "weight", None)
        if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (width,):
            continue
        signs = _alternating_signs(width, weight.dtype)
        gain = (norm(signs) - norm(-signs)).float() / (2 * signs.float())
        return gain[0]
    return None


def _alternating_signs(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns `[1, width]` of 1 and -1: mean 0 and variance 1, so norms return their gain."""
    signs = torch.ones(1, width, dtype=dtype)
    signs[:, 1::2] = -1
    return signs
