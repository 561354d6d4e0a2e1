"""Steps as whole graphs: one forward pass of a fixed number of tokens, traced without weights.

A step takes every parameter and buffer of the backbone as an input and reaches experts and
KV state through the operators of `mira_engine.model.operators`, so a traced step belongs
to an architecture, not to a loaded model: it is traced on fake tensors in another process,
kept on disk, and run with the live model's tensors. Only models whose whole state is keys
and values of plain causal attention have such steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..checkpoint.architecture import load_config, model_class
from ..errors import UnsupportedModelError
from ..types import ComputeDtype, DraftDense
from . import experts
from .attention import SPECIAL_FORMS, is_causal
from .linear import DenseSwitch, arrange_fakes, limit_draft_words
from .loader import TORCH_DTYPES, without_experts

CACHED_ATTENTION = "mira_cached"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """All that a compiled step depends on beside versions and the configuration file.

    Attributes:
        dtype: Arithmetic.
        is_native: Whether dense layers use the native kernels.
        draft_dense: What a draft multiplies with outside of the routed experts.
        draft_words: Tokens that a draft chooses among, the first ones; `None` for all.
        is_draft: Whether it is a draft's step.
        num_tokens: Tokens of the pass.
    """

    dtype: ComputeDtype
    is_native: bool
    draft_dense: DraftDense
    draft_words: int | None
    is_draft: bool
    num_tokens: int

    def to_json(self) -> str:
        """Returns the fields as JSON, always in the same order."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StepSpec:
        """Undoes `to_json`."""
        fields = json.loads(text)
        fields["dtype"] = ComputeDtype(fields["dtype"])
        fields["draft_dense"] = DraftDense(fields["draft_dense"])
        return cls(**fields)

    def __str__(self) -> str:
        kind = "draft" if self.is_draft else "target"
        return f"{kind} step of {self.num_tokens}"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step's graph.

    Attributes:
        graph: Takes `inputs`; returns `[1, T, V]` logits.
        inputs: Fake tensors in order: weights, then token ids, positions `[1, T]`, mask.
        weights: Names of the parameters and buffers that come first.
    """

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    weights: list[str]


class _OpenCache(Cache):
    """Hands keys and values through: the attention operator keeps them itself."""

    handed: tuple[torch.Tensor, torch.Tensor] | None = None
    """What the last `update` of any such cache handed through, while tracing."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _OpenCache.handed = (key_states, value_states)
        return key_states, value_states


class _Step(nn.Module):
    """A pass as a function of tokens and positions."""

    def __init__(self, model: PreTrainedModel, num_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._num_tokens = num_tokens

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=_OpenCache(self.model.config.get_text_config().num_hidden_layers),
            use_cache=True,
            logits_to_keep=self._num_tokens,
        ).logits


def _cached_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """A transformers attention function for traced steps; the mask is not looked at.

    Raises:
        UnsupportedModelError: The attention is not plain and causal.
    """
    special = [name for name in SPECIAL_FORMS if kwargs.get(name) is not None]
    if special or dropout or not is_causal(module, kwargs):
        raise UnsupportedModelError(f"its attention is not plainly causal {special or ''}".strip())
    handed, _OpenCache.handed = _OpenCache.handed, None
    if handed is None or handed[0] is not key or handed[1] is not value:
        raise UnsupportedModelError("its attention does not take its keys from the cache")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.mira.cached_attention(query, key, value, scale, module.layer_idx), None


def step_arguments(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns room for token ids and positions `[1, T]` int64, and a mask nobody looks at.

    transformers takes a mask of four dimensions as it is and builds none of its own.
    """
    tokens = torch.zeros(1, num_tokens, dtype=torch.long)
    return tokens, torch.zeros_like(tokens), torch.zeros(1, 1, 1, 1)


def other_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Returns the parameters and buffers that are not of the model's dtype, with theirs.

    The same before and after `arrange_dense`.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    return {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in named
        if tensor.dtype is not dtype and ".rows." not in name
    }


def trace_step(
    folder: Path, spec: StepSpec, dtypes: Mapping[str, str], census: Mapping[str, int]
) -> TracedStep:
    """Traces a step of the model in `folder`, of which only the configuration is read.

    Args:
        folder: The backbone.
        spec: Which step.
        dtypes: From `other_dtypes` of the loaded model.
        census: From `split_census` of the loaded model, where its draft is split.

    Raises:
        UnsupportedModelError: The model has no such step; the text says why.
    """
    experts.register()
    AttentionInterface.register(CACHED_ATTENTION, _cached_attention)
    AttentionMaskInterface.register(CACHED_ATTENTION, lambda *args, **kwargs: None)
    with FakeTensorMode():
        model = _fake_model(folder, spec, dtypes, census)
        arguments = step_arguments(spec.num_tokens)
        try:
            with torch.no_grad():
                program = torch.export.export(
                    _Step(model, spec.num_tokens), arguments, strict=False
                )
        except UnsupportedModelError:
            raise
        except Exception as error:  # torch.export documents no narrower class.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UnsupportedModelError(f"it cannot be traced: {reason[0]}") from error
    weights = []
    for given in program.graph_signature.input_specs:
        if given.kind.name in ("PARAMETER", "BUFFER"):
            weights.append(str(given.target).removeprefix("model."))
        elif given.kind.name != "USER_INPUT":
            raise UnsupportedModelError(f"its graph takes a {given.kind.name.lower()}")
    if program.graph_signature.buffers_to_mutate:
        raise UnsupportedModelError("its graph changes buffers")
    graph = program.graph_module
    if spec.is_native:
        _use_native_products(graph)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    return TracedStep(graph, inputs, weights)


def _use_native_products(graph: torch.fx.GraphModule) -> None:
    """Has the native kernel compute the products that are left, the routers' above all.

    torch's own take ten times as long for one row. Measured 2026-11-30, two Zen 4 cores,
    built-in model: 41 of 316 us of a draft's layer were its router's product.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        values = [argument.meta["val"] for argument in node.args[:2]]
        if all(value.dtype is torch.bfloat16 for value in values):
            node.target = torch.ops.mira.dense_linear.default
            node.args = (*node.args, None)[:3]
    graph.recompile()


def _fake_model(
    folder: Path, spec: StepSpec, dtypes: Mapping[str, str], census: Mapping[str, int]
) -> PreTrainedModel:
    config = load_config(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPES[spec.dtype])
    try:
        model = without_experts(model_class(config))(config)
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation(CACHED_ATTENTION)
    model.set_experts_implementation(experts.EXPERTS_IMPLEMENTATION)
    model.tie_weights()
    model.eval().requires_grad_(False)
    for name, dtype in dtypes.items():
        _change_dtype(model, name, getattr(torch, dtype))
    experts.stamp(model, _run_experts)
    if spec.is_native:
        switch = DenseSwitch()
        switch.is_drafting = spec.is_draft
        arrange_fakes(model, spec.draft_dense, switch, census)
        limit_draft_words(model, spec.draft_words)
    return model


def _change_dtype(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        tensor = module._parameters[leaf]
        module._parameters[leaf] = nn.Parameter(tensor.to(dtype), requires_grad=False)
    else:
        module._buffers[leaf] = module._buffers[leaf].to(dtype)


def _run_experts(
    module: nn.Module,
    layer: int,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    del module
    return torch.ops.mira.routed_experts(hidden, top_k_index, top_k_weights, layer)
