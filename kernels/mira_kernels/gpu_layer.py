"""The experts of one layer as they lie in a GPU's memory: records, their sections, a table.

Knows slots and sections by their offsets, nothing of stores or models, and needs no triton.
Any thread.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


class Stored(enum.IntEnum):
    """How an expert's matrices are stored."""

    DENSE = 0
    INT8 = 1
    INT4 = 2
    NESTED = 3


class Between(enum.IntEnum):
    """What lies between an expert's two matrices."""

    SILU_GATE = 0
    """`silu(gate) * up`."""
    GELU_GATE = 1
    """`gelu_tanh(gate) * up`."""
    CLAMPED_GATE = 2
    """`(up + 1) * gate * sigmoid(alpha * gate)`, both clamped. Source: gpt-oss."""
    SQUARED_RELU = 3
    """`relu(up) ** 2`, no gate. Source: Nemotron-H."""
    SILU = 4
    """`silu(up)`, no gate."""

    @property
    def has_gate(self) -> bool:
        """Whether the first matrix has gate rows beside the others."""
        return self < Between.SQUARED_RELU


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaneArena:
    """Records of one plane, one behind the other, and which expert is where.

    Attributes:
        data: uint8 `[num_slots * record_bytes]` on the device.
        record_bytes: Of one record; a multiple of 4.
        sections: Offset in bytes of each section of a record: `up`, `down`, and what there
            is of `scale`, `up_scales`, `down_scales`, `up_bias`, `down_bias`.
        table: int32 `[num_experts]`: the slot of each of the layer's experts, -1 for none.
    """

    data: Tensor
    record_bytes: int
    sections: Mapping[str, int]
    table: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerExperts:
    """The experts of one layer as the kernels take them.

    Attributes:
        stored: How they are stored.
        between: What lies between the matrices.
        hidden_size: Inputs C.
        intermediate_size: Units R.
        main: The plane with the scales and biases: the only one, or `nested`'s high one.
        low: `nested`'s low plane.
        group_size: Inputs that share a scale, of `INT4` and `NESTED`.
        is_interleaved: Whether gate and up rows alternate.
        has_bias: Whether there are biases.
        is_bias_float32: Whether these are float32, else bfloat16.
        limit: Clamp of `CLAMPED_GATE`.
        alpha: Its factor.
    """

    stored: Stored
    between: Between
    hidden_size: int
    intermediate_size: int
    main: PlaneArena
    low: PlaneArena | None = None
    group_size: int = 0
    is_interleaved: bool = False
    has_bias: bool = False
    is_bias_float32: bool = True
    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if (self.stored is Stored.NESTED) != (self.low is not None):
            raise ValueError("a low plane belongs to nested experts, and to no others")
        grouped = self.stored in (Stored.INT4, Stored.NESTED)
        if grouped and (self.group_size < 32 or self.group_size & (self.group_size - 1)):
            raise ValueError(f"groups of {self.group_size} inputs: 32, 64 or 128 are taken")
        widths = (self.hidden_size, self.intermediate_size)
        if grouped and any(width % self.group_size for width in widths):
            raise ValueError(f"groups of {self.group_size} inputs do not fill rows of {widths}")
        if self.main.record_bytes % 4:
            raise ValueError("records need a size that is a multiple of 4 bytes")
