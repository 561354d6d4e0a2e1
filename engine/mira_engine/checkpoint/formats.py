"""Expert formats: which planes an expert has, its bytes, and named views on them.

The only place in the engine that knows how an expert is laid out. A format encodes one
expert into records, binds records to weights without a copy, and decodes weights back to
float32. Knows no file, slot or model. Pure; any thread.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from mira_kernels import dispatch, packing, reference
from mira_kernels.weights import (
    DenseWeight,
    Int4Layout,
    Int4Weight,
    Int8Weight,
    NestedWeight,
    Weight,
)
from torch import Tensor

from ..errors import FormatError
from ..types import INT4_GROUP_SIZES, ExpertShape, Plane, Precision
from . import quantise
from .records import RecordLayout

_Sections = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_PlaneSections = Mapping[Plane, _Sections]


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

    def __init__(self, shape: ExpertShape, layout: Int4Layout, records: _PlaneSections) -> None:
        self.shape = shape
        self._layout = layout
        self._records = {plane: RecordLayout(sections) for plane, sections in records.items()}
        self.planes = tuple(self._records)

    @property
    def layout(self) -> str:
        """Order in memory, as the manifest names it."""
        return self._layout.value

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
        _check_tensors(tensors, self.shape)
        values = self._quantise(tensors)
        return {plane: record.pack(values[plane]) for plane, record in self._records.items()}

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


class DenseFormat(ExpertFormat):
    """`bf16` and `float32`: both matrices and biases as they are, in one dtype."""

    def __init__(self, precision: Precision, shape: ExpertShape) -> None:
        self.precision = precision
        self._dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
        sections: _Sections = {
            "up": (self._dtype, (shape.up_rows, shape.hidden_size)),
            "down": (self._dtype, (shape.hidden_size, shape.intermediate_size)),
        } | _bias_sections(shape, self._dtype)
        super().__init__(shape, Int4Layout.ROWS, {Plane.WHOLE: sections})

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        matrices = {"up": tensors.up.to(self._dtype), "down": tensors.down.to(self._dtype)}
        return {Plane.WHOLE: matrices | _bias_values(tensors, self._dtype)}

    def _bind(self, records: Mapping[Plane, Tensor]) -> BoundExpert:
        layout, record = self._records[Plane.WHOLE], records[Plane.WHOLE]
        up, down = (DenseWeight(layout.view(record, name)) for name in ("up", "down"))
        return BoundExpert(up, down, *self._biases(Plane.WHOLE, record))


class Int8Format(ExpertFormat):
    """One scale per hidden unit, shared by all its rows and its column.

    Source: Mira, INT8 expert format.
    """

    precision = Precision.INT8

    def __init__(self, shape: ExpertShape) -> None:
        sections: _Sections = {
            "up": (torch.int8, (shape.up_rows, shape.hidden_size)),
            "down": (torch.int8, (shape.hidden_size, shape.intermediate_size)),
            "scale": (torch.bfloat16, (shape.intermediate_size,)),
        } | _bias_sections(shape, torch.float32)
        super().__init__(shape, Int4Layout.ROWS, {Plane.WHOLE: sections})

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        _check_finite(tensors)
        up, down = tensors.up.to(torch.float32), tensors.down.to(torch.float32)
        scale = quantise.shared_unit_scales(self._by_unit(up), down)
        values = {
            "up": quantise.int8_codes(up, self._row_scale(scale).reshape(-1, 1)),
            "down": quantise.int8_codes(down, scale),
            "scale": scale,
        }
        return {Plane.WHOLE: values | _bias_values(tensors, torch.float32)}

    def _bind(self, records: Mapping[Plane, Tensor]) -> BoundExpert:
        layout, record = self._records[Plane.WHOLE], records[Plane.WHOLE]
        scale = layout.view(record, "scale")
        return BoundExpert(
            Int8Weight(layout.view(record, "up"), self._row_scale(scale), 0),
            Int8Weight(layout.view(record, "down"), scale, 1),
            *self._biases(Plane.WHOLE, record),
        )

    def _by_unit(self, up: Tensor) -> Tensor:
        """Views rows of the first matrix as `[parts, R, C]`."""
        shape = self.shape
        if shape.is_interleaved and shape.has_gate:
            return up.view(shape.intermediate_size, 2, -1).transpose(0, 1)
        return up.view(-1, shape.intermediate_size, shape.hidden_size)

    def _row_scale(self, scale: Tensor) -> Tensor:
        """Views `[R]` as one scale per row of the first matrix, in row order."""
        if not self.shape.has_gate:
            return scale
        if self.shape.is_interleaved:
            return scale[:, None].expand(-1, 2)
        return scale[None, :].expand(2, -1)


class _GroupFormat(ExpertFormat):
    """What `int4` and `nested` share: groups along the inputs, packed codes."""

    def __init__(
        self, shape: ExpertShape, layout: Int4Layout, group_size: int, low: tuple[Plane, ...]
    ) -> None:
        self.group_size = group_size
        self._dims = {
            "up": (shape.up_rows, shape.hidden_size),
            "down": (shape.hidden_size, shape.intermediate_size),
        }
        codes: _Sections = {
            name: (torch.uint8, (rows, columns // 2))
            for name, (rows, columns) in self._dims.items()
        }
        scales: _Sections = {
            f"{name}_scales": (torch.bfloat16, packing.scales_shape(layout, *dims, group_size))
            for name, dims in self._dims.items()
        }
        assert self.draft_plane is not None
        whole = codes | scales | _bias_sections(shape, torch.float32)
        super().__init__(shape, layout, {self.draft_plane: whole} | dict.fromkeys(low, codes))

    def _pack(self, codes: Tensor) -> Tensor:
        return packing.pack_codes(codes, self._layout)

    def bind_draft(self, record: Tensor) -> BoundExpert:
        assert self.draft_plane is not None
        layout = self._records[self.draft_plane]
        layout.check(record)
        up, down = (
            Int4Weight(
                layout.view(record, name),
                layout.view(record, f"{name}_scales"),
                self.group_size,
                self._dims[name],
                self._layout,
            )
            for name in ("up", "down")
        )
        return BoundExpert(up, down, *self._biases(self.draft_plane, record))


class Int4Format(_GroupFormat):
    """Symmetric INT4 by groups, round to nearest: a draft, or the compact target."""

    precision = Precision.INT4
    draft_plane = Plane.WHOLE

    def __init__(self, shape: ExpertShape, layout: Int4Layout, group_size: int) -> None:
        super().__init__(shape, layout, group_size, ())

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        _check_finite(tensors)
        values = _bias_values(tensors, torch.float32)
        for name, matrix in (("up", tensors.up), ("down", tensors.down)):
            quantised = quantise.quantise_int4(matrix, self.group_size)
            values[name] = self._pack(quantised.codes)
            values[f"{name}_scales"] = packing.arrange_scales(quantised.scales, self._layout)
        return {Plane.WHOLE: values}

    def _bind(self, records: Mapping[Plane, Tensor]) -> BoundExpert:
        return self.bind_draft(records[Plane.WHOLE])


class NestedFormat(_GroupFormat):
    """INT8 as two INT4 planes, of which the high one is the draft."""

    precision = Precision.NESTED
    draft_plane = Plane.HI

    def __init__(self, shape: ExpertShape, layout: Int4Layout, group_size: int) -> None:
        super().__init__(shape, layout, group_size, (Plane.LO,))

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        _check_finite(tensors)
        high, low = _bias_values(tensors, torch.float32), {}
        for name, matrix in (("up", tensors.up), ("down", tensors.down)):
            quantised = quantise.quantise_nested(matrix, self.group_size)
            hi, lo = quantise.split_planes(quantised.codes)
            high[name], low[name] = self._pack(hi), self._pack(lo)
            scales = quantised.scales * quantise.PLANE_BASE
            high[f"{name}_scales"] = packing.arrange_scales(scales, self._layout)
        return {Plane.HI: high, Plane.LO: low}

    def _bind(self, records: Mapping[Plane, Tensor]) -> BoundExpert:
        return self.combine(self.bind_draft(records[Plane.HI]), self.bind_low(records[Plane.LO]))

    def bind_low(self, record: Tensor) -> LowPlanes:
        """Returns views on a low record.

        Raises:
            StoreError: The record has another size.
        """
        layout = self._records[Plane.LO]
        layout.check(record)
        return LowPlanes(layout.view(record, "up"), layout.view(record, "down"))

    @staticmethod
    def combine(high: BoundExpert, low: LowPlanes) -> BoundExpert:
        """Joins both planes of one expert; a few object constructions, no tensor call."""
        return BoundExpert(
            NestedWeight(high.up, low.up),
            NestedWeight(high.down, low.down),
            high.up_bias,
            high.down_bias,
        )


def make_format(
    precision: Precision, shape: ExpertShape, *, layout: str | None = None
) -> ExpertFormat:
    """Builds the format of experts of `shape`.

    Args:
        precision: Which format.
        shape: Dimensions of the experts.
        layout: As a manifest names it; `None` takes what is fastest on this machine.

    Raises:
        FormatError: The format cannot hold these experts, or has no such layout.
    """
    if precision in (Precision.INT4, Precision.NESTED):
        group_size = _require_group_size(precision, shape)
        order = _int4_layout(shape, group_size, layout)
        made = Int4Format if precision is Precision.INT4 else NestedFormat
        return made(shape, order, group_size)
    if layout not in (None, Int4Layout.ROWS.value):
        raise FormatError(f"The {precision} format has no layout {layout!r}.")
    if precision is Precision.INT8:
        return Int8Format(shape)
    return DenseFormat(precision, shape)


def int8_reference_bytes(shape: ExpertShape) -> int:
    """Record bytes of one expert in INT8; percentages of a budget refer to it."""
    return Int8Format(shape).record_bytes(Plane.WHOLE)


def _require_group_size(precision: Precision, shape: ExpertShape) -> int:
    if shape.int4_group_size is None:
        raise FormatError(
            f"The {precision} format needs a group of {_listed(INT4_GROUP_SIZES)} that divides "
            f"both input dimensions, {shape.hidden_size} and {shape.intermediate_size}.",
            hint="Use the int8 or bf16 precision for this model.",
        )
    return shape.int4_group_size


def _int4_layout(shape: ExpertShape, group_size: int, name: str | None) -> Int4Layout:
    """The named layout, or the preferred one if it fits both matrices."""
    matrices = (
        (shape.up_rows, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    )
    if name is None:
        preferred = {dispatch.preferred_int4_layout(*dims, group_size) for dims in matrices}
        return preferred.pop() if len(preferred) == 1 else Int4Layout.ROWS
    if name not in {layout.value for layout in Int4Layout}:
        raise FormatError(f"No expert layout is called {name!r}.", hint="Prepare the model again.")
    layout = Int4Layout(name)
    if not all(packing.fits_layout(layout, *dims, group_size) for dims in matrices):
        raise FormatError(f"The layout {name!r} does not fit experts of this shape.")
    return layout


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers[:-1]) + f" or {numbers[-1]}"


def _bias_sections(shape: ExpertShape, dtype: torch.dtype) -> _Sections:
    if not shape.has_bias:
        return {}
    return {"up_bias": (dtype, (shape.up_rows,)), "down_bias": (dtype, (shape.hidden_size,))}


def _bias_values(tensors: ExpertTensors, dtype: torch.dtype) -> dict[str, Tensor]:
    if tensors.up_bias is None or tensors.down_bias is None:
        return {}
    return {"up_bias": tensors.up_bias.to(dtype), "down_bias": tensors.down_bias.to(dtype)}


def _check_tensors(tensors: ExpertTensors, shape: ExpertShape) -> None:
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


def _check_finite(tensors: ExpertTensors) -> None:
    quantise.check_finite("first matrix", tensors.up)
    quantise.check_finite("second matrix", tensors.down)
