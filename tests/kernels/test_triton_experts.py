"""The GPU kernels against float64, run by triton's interpreter on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from mira_engine.checkpoint.expert import ExpertFormat, ExpertTensors
from mira_engine.checkpoint.formats import make_format
from mira_engine.types import ExpertShape, Plane, Precision
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this system")

from mira_kernels import triton_experts as kernels  # noqa: E402
from mira_kernels.triton_experts import (  # noqa: E402
    Between,
    LayerExperts,
    PlaneArena,
    Stored,
    combine,
    draft_layer,
    expert_outputs,
    group_by_expert,
)

STORED = {
    Precision.BF16: Stored.DENSE,
    Precision.INT8: Stored.INT8,
    Precision.INT4: Stored.INT4,
    Precision.NESTED: Stored.NESTED,
}
NUM_EXPERTS = 5
PRECISIONS = tuple(STORED)


class Layer:
    """Random experts of one format in slots of their own order, and their float64 truth."""

    def __init__(
        self,
        precision: Precision,
        *,
        hidden_size: int = 96,
        intermediate_size: int = 64,
        between: Between = Between.SILU_GATE,
        has_bias: bool = False,
        is_interleaved: bool = False,
        missing: tuple[int, ...] = (),
    ) -> None:
        self.between = between
        shape = ExpertShape(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            has_gate=between.has_gate,
            has_bias=has_bias,
            is_interleaved=is_interleaved,
        )
        self.format: ExpertFormat = make_format(precision, shape, layout="rows")
        generator = torch.Generator().manual_seed(3)
        encoded, self.truth = [], []
        for _ in range(NUM_EXPERTS):
            tensors = _random_expert(shape, generator)
            records = self.format.encode(tensors)
            encoded.append(records)
            self.truth.append(self.format.decode(self.format.bind(records)))
        self.missing = missing
        self.planes = {
            plane: _arena(self.format, plane, encoded, order, missing)
            for plane, order in zip(
                self.format.planes, ([3, 0, 4, 1, 2], [1, 4, 2, 0, 3]), strict=False
            )
        }
        main, *low = self.planes.values()
        self.experts = LayerExperts(
            stored=STORED[precision],
            between=between,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            main=main,
            low=low[0] if low else None,
            group_size=self.format.group_size or 0,
            is_interleaved=is_interleaved,
            has_bias=has_bias,
            is_bias_float32=precision is not Precision.BF16,
        )

    def outputs(self, hidden: Tensor, top_k_index: Tensor) -> Tensor:
        """`[T * k, C]` float64: what every assignment should give."""
        rows = []
        for token, chosen in enumerate(top_k_index.tolist()):
            for expert in chosen:
                rows.append(self._output(hidden[token].double(), expert))
        return torch.stack(rows)

    def _output(self, x: Tensor, expert: int) -> Tensor:
        if expert in self.missing:
            return x.new_zeros(self.experts.hidden_size)
        tensors = self.truth[expert]
        inner = tensors.up.double() @ x
        if tensors.up_bias is not None:
            inner = inner + tensors.up_bias.double()
        y = tensors.down.double() @ _between(inner, self.experts)
        return y if tensors.down_bias is None else y + tensors.down_bias.double()


def _random_expert(shape: ExpertShape, generator: torch.Generator) -> ExpertTensors:
    def draw(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator) / dims[-1] ** 0.5

    return ExpertTensors(
        up=draw(shape.up_rows, shape.hidden_size).to(torch.bfloat16),
        down=draw(shape.hidden_size, shape.intermediate_size).to(torch.bfloat16),
        up_bias=draw(shape.up_rows).to(torch.bfloat16) if shape.has_bias else None,
        down_bias=draw(shape.hidden_size).to(torch.bfloat16) if shape.has_bias else None,
    )


def _arena(
    fmt: ExpertFormat,
    plane: Plane,
    encoded: list[dict[Plane, Tensor]],
    order: list[int],
    missing: tuple[int, ...],
) -> PlaneArena:
    """Puts expert e into slot `order[e]`."""
    record_bytes = fmt.record_bytes(plane)
    data = torch.zeros(NUM_EXPERTS * record_bytes, dtype=torch.uint8)
    for expert, slot in enumerate(order):
        data[slot * record_bytes : (slot + 1) * record_bytes] = encoded[expert][plane]
    table = torch.tensor(order, dtype=torch.int32)
    table[list(missing)] = -1
    return PlaneArena(
        data=data, record_bytes=record_bytes, sections=fmt.section_offsets(plane), table=table
    )


def _between(inner: Tensor, experts: LayerExperts) -> Tensor:
    if not experts.between.has_gate:
        if experts.between is Between.SQUARED_RELU:
            return torch.relu(inner) ** 2
        return torch.nn.functional.silu(inner)
    if experts.is_interleaved:
        gate, up = inner[0::2], inner[1::2]
    else:
        gate, up = inner.chunk(2)
    if experts.between is Between.SILU_GATE:
        return torch.nn.functional.silu(gate) * up
    if experts.between is Between.GELU_GATE:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return (up + 1) * gate * torch.sigmoid(gate * experts.alpha)


def _routing(num_tokens: int, top_k: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randperm(NUM_EXPERTS, generator=generator)[:top_k] for _ in range(num_tokens)]
    )


def _hidden(num_tokens: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, width, generator=generator).to(dtype)


def _worst(found: Tensor, expected: Tensor) -> float:
    """Largest error, relative to the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
def test_outputs_of_every_format_are_the_products(
    precision: Precision, dtype: torch.dtype, bound: float
) -> None:
    layer = Layer(precision)
    hidden, routing = _hidden(7, 96, dtype), _routing(7)

    found = expert_outputs(hidden, layer.experts, group_by_expert(routing, NUM_EXPERTS))

    assert found.dtype is dtype
    assert _worst(found, layer.outputs(hidden, routing)) < bound


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_outputs_of_odd_sizes_are_the_products(precision: Precision) -> None:
    layer = Layer(precision, hidden_size=70, intermediate_size=38)
    hidden, routing = _hidden(3, 70), _routing(3)

    found = expert_outputs(hidden, layer.experts, group_by_expert(routing, NUM_EXPERTS))

    assert _worst(found, layer.outputs(hidden, routing)) < 1e-5


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
    hidden, routing = _hidden(4, 96), _routing(4)

    found = expert_outputs(hidden, layer.experts, group_by_expert(routing, NUM_EXPERTS))

    assert _worst(found, layer.outputs(hidden, routing)) < 1e-5


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.NESTED])
def test_outputs_of_a_token_do_not_depend_on_who_shares_the_launch(precision: Precision) -> None:
    layer = Layer(precision)
    hidden, routing = _hidden(37, 96, torch.bfloat16), _routing(37)
    together = expert_outputs(hidden, layer.experts, group_by_expert(routing, NUM_EXPERTS))

    for token in (0, 17, 36):
        alone = expert_outputs(
            hidden[token : token + 1],
            layer.experts,
            group_by_expert(routing[token : token + 1], NUM_EXPERTS),
        )
        assert torch.equal(alone, together[2 * token : 2 * token + 2])


def test_outputs_of_experts_in_no_slot_are_zero_and_the_others_right() -> None:
    layer = Layer(Precision.NESTED, missing=(1, 3))
    hidden, routing = _hidden(6, 96), _routing(6)

    found = expert_outputs(hidden, layer.experts, group_by_expert(routing, NUM_EXPERTS))

    is_missing = torch.isin(routing.reshape(-1), torch.tensor([1, 3]))
    assert is_missing.any()
    assert not found[is_missing].any()
    assert _worst(found, layer.outputs(hidden, routing)) < 1e-5


def test_grouping_covers_every_row_once_where_experts_are_empty_and_full() -> None:
    routing = torch.tensor([[4, 0]] * 20 + [[4, 2]] * 15)

    rows = group_by_expert(routing, NUM_EXPERTS)

    seen = []
    for expert, start in zip(rows.block_expert.tolist(), rows.block_start.tolist(), strict=True):
        if expert < 0:
            continue
        stop = min(start + kernels.BLOCK_M, int(rows.expert_stop[expert]))
        assert start < stop
        chosen = rows.order[start:stop].tolist()
        assert all(routing.reshape(-1)[row] == expert for row in chosen)
        seen += chosen
    assert sorted(seen) == list(range(70))


def test_combine_weights_and_sums_in_the_routers_order() -> None:
    outputs, weights = torch.randn(8, 300), torch.rand(4, 2)

    found = combine(outputs, weights)

    expected = (outputs.view(4, 2, 300) * weights[:, :, None]).sum(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_draft_layer_is_the_weighted_sum_and_counts_what_was_routed(num_tokens: int) -> None:
    layer = Layer(Precision.INT4, missing=(2,))
    hidden, routing = _hidden(num_tokens, 96), _routing(num_tokens, top_k=3)
    weights = torch.rand(num_tokens, 3)
    counts = torch.ones(NUM_EXPERTS, dtype=torch.int32)
    inner, result = torch.full((num_tokens * 3, 64), 9.0), torch.full((num_tokens, 96), 9.0)

    draft_layer(hidden, layer.experts, routing, weights, counts, inner, result)

    truth = layer.outputs(hidden, routing).view(num_tokens, 3, 96)
    assert _worst(result, (truth * weights.double()[:, :, None]).sum(1)) < 1e-5
    expected = 1 + torch.bincount(routing.reshape(-1), minlength=NUM_EXPERTS)
    assert counts.tolist() == expected.tolist()


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
