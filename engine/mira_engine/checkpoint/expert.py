"""What an expert is before, in and after its records, and what every format can do.

Owns the words that formats share; the formats themselves are in `formats`. Pure; any
thread.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from mira_kernels import dispatch, reference
from mira_kernels.weights import Int4Layout, Weight
from torch import Tensor

from ..errors import FormatError
from ..types import ExpertShape, Plane, Precision
from .quantise import check_finite
from .quantised_expert import QuantisedExpert
from .records import RecordLayout, Sections

PlaneSections = Mapping[Plane, Sections]
"""Sections of every plane of an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTensors:
    """One expert as its checkpoint has it, both matrices `[out, in]`.

    Attributes:
        up: `[up_rows, C]`; the rows keep the module's own order, interleaved or not.
        down: `[C, R]`.
        up_bias: `[up_rows]` or `None`.
        down_bias: `[C]` or `None`.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BoundExpert:
    """Views on an expert's records that kernels can multiply with."""

    up: Weight
    down: Weight
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LowPlanes:
    """Views on a nested expert's low record: codes of both matrices, no scales."""

    up: Tensor
    down: Tensor


class ExpertFormat(abc.ABC):
    """How experts of one shape are stored at one precision.

    Attributes:
        precision: Which format.
        shape: Dimensions of the experts.
        layout: Order in memory, as the manifest names it.
        group_size: Inputs that share a scale, `None` where scales are not by group.
        planes: Records of one expert, in storing order.
        draft_plane: The plane that alone is a complete INT4 expert, or `None`.
    """

    precision: Precision
    draft_plane: Plane | None = None
    group_size: int | None = None

    def __init__(self, shape: ExpertShape, layout: Int4Layout, records: PlaneSections) -> None:
        self.shape = shape
        self._layout = layout
        self._records = {plane: RecordLayout(sections) for plane, sections in records.items()}
        self.planes = tuple(self._records)

    @property
    def layout(self) -> str:
        """Order in memory, as the manifest names it."""
        return self._layout.value

    @property
    def block_rows(self) -> int:
        """Rows that the layout interleaves, 1 for plain rows."""
        return self._layout.block_rows

    @property
    def is_native(self) -> bool:
        """Whether this machine's kernels read the layout; if not, it works but slowly."""
        return not self._layout.is_packed or dispatch.is_native(self._layout)

    def record_bytes(self, plane: Plane) -> int:
        """Bytes of one record, a multiple of 4096."""
        return self._records[plane].record_bytes

    def payload_bytes(self, plane: Plane) -> int:
        """Bytes of one record without its padding."""
        return self._records[plane].payload_bytes

    def encode(self, tensors: ExpertTensors) -> dict[Plane, Tensor]:
        """Quantises and packs one expert.

        Returns:
            uint8 `[record_bytes]` for each plane.

        Raises:
            FormatError: The tensors have other shapes than `shape` says, or hold values
                that the format cannot store.
        """
        check_tensors(tensors, self.shape)
        values = self._quantise(tensors)
        return {plane: record.pack(values[plane]) for plane, record in self._records.items()}

    def encode_quantised(self, expert: QuantisedExpert) -> dict[Plane, Tensor]:
        """Packs one expert whose INT4 codes and scales are given.

        Returns:
            uint8 `[record_bytes]` for each plane.

        Raises:
            FormatError: The format cannot hold such codes, or they are not of an expert of
                `shape`.
        """
        raise FormatError(
            f"The {self.precision} format holds no INT4 codes that were made elsewhere.",
            hint="Use the int4 format for them.",
        )

    def bind(self, records: Mapping[Plane, Tensor]) -> BoundExpert:
        """Returns weights that are views on the records; nothing is copied or kept.

        Args:
            records: uint8 `[record_bytes]` of every plane.

        Raises:
            FormatError: A plane is missing.
            StoreError: A record has another size.
        """
        for plane, layout in self._records.items():
            if plane not in records:
                raise FormatError(f"The {plane} plane of a {self.precision} expert is missing.")
            layout.check(records[plane])
        return self._bind(records)

    def bind_draft(self, record: Tensor) -> BoundExpert:
        """Returns the INT4 expert that the record of `draft_plane` is.

        Raises:
            FormatError: The format has no such plane.
            StoreError: The record has another size.
        """
        raise FormatError(
            f"The {self.precision} format holds no INT4 draft.",
            hint="Prepare the int4 store beside it.",
        )

    def decode(self, bound: BoundExpert) -> ExpertTensors:
        """Returns the matrices and biases that the weights stand for, float32, copied."""
        return ExpertTensors(
            up=reference.dequantise(bound.up),
            down=reference.dequantise(bound.down),
            up_bias=None if bound.up_bias is None else bound.up_bias.to(torch.float32, copy=True),
            down_bias=(
                None if bound.down_bias is None else bound.down_bias.to(torch.float32, copy=True)
            ),
        )

    @abc.abstractmethod
    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        """Returns every section of every plane."""

    @abc.abstractmethod
    def _bind(self, records: Mapping[Plane, Tensor]) -> BoundExpert:
        """Binds checked records."""

    def _biases(self, plane: Plane, record: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not self.shape.has_bias:
            return None, None
        layout = self._records[plane]
        return layout.view(record, "up_bias"), layout.view(record, "down_bias")


def bias_sections(shape: ExpertShape, dtype: torch.dtype) -> Sections:
    """Sections of both biases, empty where experts have none."""
    if not shape.has_bias:
        return {}
    return {"up_bias": (dtype, (shape.up_rows,)), "down_bias": (dtype, (shape.hidden_size,))}


def bias_values(tensors: ExpertTensors | QuantisedExpert, dtype: torch.dtype) -> dict[str, Tensor]:
    """Contents of `bias_sections`."""
    if tensors.up_bias is None or tensors.down_bias is None:
        return {}
    return {"up_bias": tensors.up_bias.to(dtype), "down_bias": tensors.down_bias.to(dtype)}


def check_tensors(tensors: ExpertTensors, shape: ExpertShape) -> None:
    """Refuses an expert whose tensors are not as `shape` says.

    Raises:
        FormatError: A tensor has another shape, is missing, or should not be there.
    """
    expected = {
        "up": (shape.up_rows, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "up_bias": (shape.up_rows,) if shape.has_bias else None,
        "down_bias": (shape.hidden_size,) if shape.has_bias else None,
    }
    for name, dims in expected.items():
        given = getattr(tensors, name)
        found = None if given is None else tuple(given.shape)
        if found != dims:
            raise FormatError(f"The expert's {name} should have shape {dims}, but has {found}.")


def check_all_finite(tensors: ExpertTensors) -> None:
    """Refuses an expert with nan or infinity in a matrix.

    Raises:
        FormatError: There is one.
    """
    check_finite("first matrix", tensors.up)
    check_finite("second matrix", tensors.down)
