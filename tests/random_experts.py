"""Random experts of one layer in device memory, and their float64 truth."""

from __future__ import annotations

import torch
from mira_engine.checkpoint.expert import ExpertFormat, ExpertTensors
from mira_engine.checkpoint.formats import make_format
from mira_engine.types import ExpertShape, Plane, Precision
from mira_kernels.gpu_layer import Between, LayerExperts, PlaneArena, Stored
from torch import Tensor

STORED = {
    Precision.BF16: Stored.DENSE,
    Precision.INT8: Stored.INT8,
    Precision.INT4: Stored.INT4,
    Precision.NESTED: Stored.NESTED,
}
NUM_EXPERTS = 5


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
        device: str = "cpu",
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
            plane: _arena(self.format, plane, encoded, order, missing, device)
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
        """`[T * k, C]` float64 on the CPU: what every assignment should give."""
        hidden, rows = hidden.cpu(), []
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
    device: str,
) -> PlaneArena:
    """Puts expert e into slot `order[e]`."""
    record_bytes = fmt.record_bytes(plane)
    data = torch.zeros(NUM_EXPERTS * record_bytes, dtype=torch.uint8)
    for expert, slot in enumerate(order):
        data[slot * record_bytes : (slot + 1) * record_bytes] = encoded[expert][plane]
    table = torch.tensor(order, dtype=torch.int32)
    table[list(missing)] = -1
    return PlaneArena(
        data=data.to(device),
        record_bytes=record_bytes,
        sections=fmt.section_offsets(plane),
        table=table.to(device),
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


def routing(num_tokens: int, top_k: int = 2, seed: int = 0) -> Tensor:
    """Draws `[T, k]` experts, all different for a token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randperm(NUM_EXPERTS, generator=generator)[:top_k] for _ in range(num_tokens)]
    )


def hidden_states(num_tokens: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws `[T, C]`."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, width, generator=generator).to(dtype)


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Largest error, relative to the largest value."""
    return float((found.cpu().double() - expected).abs().max() / expected.abs().max())
