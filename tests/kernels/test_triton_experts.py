"""The GPU kernels against float64, run by triton's interpreter on CPU tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from mira_engine.types import Plane, Precision

pytest.importorskip("triton", reason="triton has no wheel for this system")

from mira_kernels.assignments import group_by_expert
from mira_kernels.gpu_layer import Between, LayerExperts, Stored
from mira_kernels.tiles import BLOCK_M
from mira_kernels.triton_experts import combine, draft_layer, expert_outputs
from random_experts import NUM_EXPERTS, STORED, Layer, hidden_states, routing, worst_error

PRECISIONS = tuple(STORED)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
    ids=["float32", "bfloat16", "float16"],
)
def test_outputs_of_every_format_are_the_products(
    precision: Precision, dtype: torch.dtype, bound: float
) -> None:
    layer = Layer(precision)
    hidden, chosen = hidden_states(7, 96, dtype), routing(7)

    found = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))

    assert found.dtype is dtype
    assert worst_error(found, layer.outputs(hidden, chosen)) < bound


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_outputs_of_odd_sizes_are_the_products(precision: Precision) -> None:
    layer = Layer(precision, hidden_size=70, intermediate_size=38)
    hidden, chosen = hidden_states(3, 70), routing(3)

    found = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))

    assert worst_error(found, layer.outputs(hidden, chosen)) < 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "form",
    [
        {"between": Between.CLAMPED_GATE, "has_bias": True, "is_interleaved": True},
        {"between": Between.SQUARED_RELU},
        {"between": Between.GELU_GATE},
        {"between": Between.SILU, "has_bias": True},
    ],
    ids=["clamped", "no-gate", "gelu", "silu-no-gate"],
)
def test_outputs_of_family_variants_are_the_products(
    precision: Precision, form: dict[str, object]
) -> None:
    layer = Layer(precision, **form)
    hidden, chosen = hidden_states(4, 96), routing(4)

    found = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))

    assert worst_error(found, layer.outputs(hidden, chosen)) < 1e-5


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.NESTED])
def test_outputs_of_a_token_do_not_depend_on_who_shares_the_launch(precision: Precision) -> None:
    layer = Layer(precision)
    hidden, chosen = hidden_states(37, 96, torch.bfloat16), routing(37)
    together = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))

    for token in (0, 17, 36):
        alone = expert_outputs(
            hidden[token : token + 1],
            layer.experts,
            group_by_expert(chosen[token : token + 1], NUM_EXPERTS),
        )
        assert torch.equal(alone, together[2 * token : 2 * token + 2])


def test_outputs_of_experts_in_no_slot_are_zero_and_the_others_right() -> None:
    layer = Layer(Precision.NESTED, missing=(1, 3))
    hidden, chosen = hidden_states(6, 96), routing(6)

    found = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))

    is_missing = torch.isin(chosen.reshape(-1), torch.tensor([1, 3]))
    assert is_missing.any()
    assert not found[is_missing].any()
    assert worst_error(found, layer.outputs(hidden, chosen)) < 1e-5


def test_outputs_do_not_depend_on_what_the_memory_between_held() -> None:
    layer = Layer(Precision.NESTED, missing=(1, 3))
    hidden, chosen = hidden_states(6, 96), routing(6)
    rows = group_by_expert(chosen, NUM_EXPERTS)
    is_missing = torch.isin(chosen.reshape(-1), torch.tensor([1, 3]))
    inner = torch.full((12, 64), torch.nan)

    found = expert_outputs(hidden, layer.experts, rows, inner=inner)

    assert torch.equal(found, expert_outputs(hidden, layer.experts, rows))
    assert torch.equal(inner.isnan().all(dim=1), is_missing), "no work for experts in no slot"
    assert inner[~is_missing].isfinite().all()


def test_assignments_of_experts_in_no_slot_are_counted_once_each() -> None:
    layer = Layer(Precision.INT8, missing=(1, 3))
    hidden, chosen = hidden_states(40, 96), routing(40)
    misses = torch.tensor([5], dtype=torch.int32)

    expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS), misses=misses)

    num_missing = int(torch.isin(chosen, torch.tensor([1, 3])).sum())
    assert num_missing > BLOCK_M, "more than a tile of rows"
    assert misses.tolist() == [5 + num_missing]


def test_grouping_covers_every_row_once_where_experts_are_empty_and_full() -> None:
    chosen = torch.tensor([[4, 0]] * 20 + [[4, 2]] * 15)

    rows = group_by_expert(chosen, NUM_EXPERTS)

    seen = []
    for expert, start in zip(rows.block_expert.tolist(), rows.block_start.tolist(), strict=True):
        if expert < 0:
            continue
        stop = min(start + BLOCK_M, int(rows.expert_stop[expert]))
        assert start < stop
        mine = rows.order[start:stop].tolist()
        assert all(chosen.reshape(-1)[row] == expert for row in mine)
        seen += mine
    assert sorted(seen) == list(range(70))


def test_combine_weights_and_sums_in_the_routers_order() -> None:
    outputs, weights = torch.randn(8, 300), torch.rand(4, 2)

    found = combine(outputs, weights)

    expected = (outputs.view(4, 2, 300) * weights[:, :, None]).sum(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_draft_layer_is_the_weighted_sum_and_counts_what_was_routed(num_tokens: int) -> None:
    layer = Layer(Precision.INT4, missing=(2,))
    hidden, chosen = hidden_states(num_tokens, 96), routing(num_tokens, top_k=3)
    weights = torch.rand(num_tokens, 3)
    counts = torch.ones(NUM_EXPERTS, dtype=torch.int32)
    inner, result = torch.full((num_tokens * 3, 64), 9.0), torch.full((num_tokens, 96), 9.0)

    draft_layer(hidden, layer.experts, chosen, weights, counts, inner, result)

    truth = layer.outputs(hidden, chosen).view(num_tokens, 3, 96)
    assert worst_error(result, (truth * weights.double()[:, :, None]).sum(1)) < 1e-5
    expected = 1 + torch.bincount(chosen.reshape(-1), minlength=NUM_EXPERTS)
    assert counts.tolist() == expected.tolist()


def test_layer_whose_rows_end_within_a_group_is_refused() -> None:
    whole = Layer(Precision.INT4).experts

    with pytest.raises(ValueError, match="do not fill"):
        dataclasses.replace(whole, intermediate_size=48)


def test_layer_without_its_low_plane_is_refused() -> None:
    whole = Layer(Precision.INT8).planes[Plane.WHOLE]

    with pytest.raises(ValueError, match="low plane"):
        LayerExperts(
            stored=Stored.NESTED,
            between=Between.SILU_GATE,
            hidden_size=96,
            intermediate_size=64,
            main=whole,
            group_size=32,
        )
