"""The card's expert kernels as a few torch calls each, in a hundredth of the interpreter's time.

For tests of what goes on around the kernels; these themselves are tested in `tests/kernels`.
They read what kernels read: arenas, offsets and tables. Gated experts without biases, dense or
in INT4 planes; float64 within a product, so that a token's result does not depend on others'.
"""

from __future__ import annotations

import pytest
import torch
from mira_kernels import reference, triton_experts
from mira_kernels.assignments import Assignments
from mira_kernels.gpu_layer import Between, LayerExperts, PlaneArena, Stored
from mira_kernels.weights import DenseWeight, Int4Layout, Int4Weight, NestedWeight, Weight
from torch import Tensor


def use_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts these in place of the kernels for a test."""
    monkeypatch.setattr(triton_experts, "expert_outputs", _expert_outputs)
    monkeypatch.setattr(triton_experts, "draft_layer", _draft_layer)
    monkeypatch.setattr(triton_experts, "combine", _combine)


def _expert_outputs(
    hidden: Tensor, experts: LayerExperts, rows: Assignments, *, inner: Tensor, result: Tensor
) -> Tensor:
    start = 0
    for expert, stop in enumerate(rows.expert_stop.tolist()):
        places = rows.order[start:stop].long()
        if len(places) and _is_there(experts, expert):
            result[places] = _output(hidden[places // rows.top_k], experts, expert)
        start = stop
    return result


def _draft_layer(
    hidden: Tensor,
    experts: LayerExperts,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    counts: Tensor,
    inner: Tensor,
    result: Tensor,
) -> Tensor:
    result.zero_()
    for token, chosen in enumerate(top_k_index.tolist()):
        for place, expert in enumerate(chosen):
            counts[expert] += 1
            if _is_there(experts, expert):
                output = _output(hidden[token : token + 1], experts, expert)[0]
                result[token] += top_k_weights[token, place] * output
    return result


def _combine(outputs: Tensor, top_k_weights: Tensor) -> Tensor:
    by_token = outputs.view(*top_k_weights.shape, -1).float()
    return (by_token * top_k_weights.float()[..., None]).sum(dim=1).to(outputs.dtype)


def _is_there(experts: LayerExperts, expert: int) -> bool:
    planes = [experts.main] if experts.low is None else [experts.main, experts.low]
    return all(int(plane.table[expert]) >= 0 for plane in planes)


def _output(x: Tensor, experts: LayerExperts, expert: int) -> Tensor:
    assert experts.between is Between.SILU_GATE
    assert not experts.has_bias
    assert not experts.is_interleaved
    width, units = experts.hidden_size, experts.intermediate_size
    both = reference.linear(x, _weight(experts, "up", (2 * units, width), expert))
    gate, up = both.chunk(2, dim=-1)
    inner = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    return reference.linear(inner, _weight(experts, "down", (width, units), expert)).to(x.dtype)


def _weight(experts: LayerExperts, name: str, shape: tuple[int, int], expert: int) -> Weight:
    num_rows, num_inputs = shape
    if experts.stored is Stored.DENSE:
        section = _section(experts.main, name, 2 * num_rows * num_inputs, expert)
        return DenseWeight(section.view(torch.bfloat16).view(shape))
    num_bytes, num_groups = num_rows * num_inputs // 2, num_inputs // experts.group_size
    scales = _section(experts.main, f"{name}_scales", 2 * num_rows * num_groups, expert)
    high = Int4Weight(
        _section(experts.main, name, num_bytes, expert).view(num_rows, -1),
        scales.view(torch.bfloat16).view(num_rows, num_groups),
        experts.group_size,
        shape,
        Int4Layout.ROWS,
    )
    if experts.low is None:
        return high
    return NestedWeight(high, _section(experts.low, name, num_bytes, expert).view(num_rows, -1))


def _section(plane: PlaneArena, name: str, num_bytes: int, expert: int) -> Tensor:
    start = int(plane.table[expert]) * plane.record_bytes + plane.sections[name]
    return plane.data[start : start + num_bytes]
