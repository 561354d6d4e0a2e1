"""What lies between an expert's matrices, found in transformers' modules and named for the kernels.

Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from mira_kernels.gpu_layer import Between
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuForm:
    """What lies between an expert's matrices, as the kernels name it.

    Attributes:
        between: The form.
        limit: Clamp of a clamped gate.
        alpha: Its factor.
    """

    between: Between
    limit: float = 0.0
    alpha: float = 0.0


def gpu_form(module: nn.Module) -> GpuForm | None:
    """Finds the kernels' form of an experts module; `None` where they have none."""
    if module.has_post_expert_norm:
        return None
    act = type(module.act_fn) if hasattr(module, "act_fn") else None
    is_silu = act in (nn.SiLU, type(ACT2FN["silu"]))
    if not module.has_gate:
        if act is type(ACT2FN["relu2"]):
            return GpuForm(between=Between.SQUARED_RELU)
        return GpuForm(between=Between.SILU) if is_silu else None
    if type(module)._apply_gate is moe._default_apply_gate:
        if act is type(ACT2FN["gelu_pytorch_tanh"]):
            return GpuForm(between=Between.GELU_GATE)
        return GpuForm(between=Between.SILU_GATE) if is_silu else None
    if type(module).__name__ == "GptOssExperts":
        return GpuForm(between=Between.CLAMPED_GATE, limit=module.limit, alpha=module.alpha)
    return None
