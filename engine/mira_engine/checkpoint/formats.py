"""Expert formats: which planes an expert has, its bytes, and named views on them.

The only place in the engine that knows how an expert is laid out. A format encodes one
expert into records, binds records to weights without a copy, and decodes weights back to
float32. Knows no file, slot or model. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from mira_kernels import dispatch, packing
from mira_kernels.weights import (
    DenseWeight,
    Int4Layout,
    Int4Weight,
    Int8Weight,
    NestedWeight,
)
from torch import Tensor

from ..errors import FormatError
from ..types import INT4_GROUP_SIZES, ExpertShape, Plane, Precision
from . import quantise
from .expert import (
    BoundExpert,
    ExpertFormat,
    ExpertTensors,
    LowPlanes,
    bias_sections,
    bias_values,
    check_all_finite,
    check_tensors,
)
from .quantised_expert import QuantisedExpert, check_quantised
from .records import Sections

__all__ = [
    "BoundExpert",
    "DenseFormat",
    "ExpertFormat",
    "ExpertTensors",
    "Int4Format",
    "Int8Format",
    "LowPlanes",
    "NestedFormat",
    "int8_reference_bytes",
    "make_format",
]


class DenseFormat(ExpertFormat):
    """`bf16` and `float32`: both matrices and biases as they are, in one dtype."""

    def __init__(self, precision: Precision, shape: ExpertShape) -> None:
        self.precision = precision
        self._dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
        sections: Sections = {
            "up": (self._dtype, (shape.up_rows, shape.hidden_size)),
            "down": (self._dtype, (shape.hidden_size, shape.intermediate_size)),
        } | bias_sections(shape, self._dtype)
        super().__init__(shape, Int4Layout.ROWS, {Plane.WHOLE: sections})

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        matrices = {"up": tensors.up.to(self._dtype), "down": tensors.down.to(self._dtype)}
        return {Plane.WHOLE: matrices | bias_values(tensors, self._dtype)}

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
        sections: Sections = {
            "up": (torch.int8, (shape.up_rows, shape.hidden_size)),
            "down": (torch.int8, (shape.hidden_size, shape.intermediate_size)),
            "scale": (torch.bfloat16, (shape.intermediate_size,)),
        } | bias_sections(shape, torch.float32)
        super().__init__(shape, Int4Layout.ROWS, {Plane.WHOLE: sections})

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        check_all_finite(tensors)
        up, down = tensors.up.to(torch.float32), tensors.down.to(torch.float32)
        scale = quantise.shared_unit_scales(self._by_unit(up), down)
        values = {
            "up": quantise.int8_codes(up, self._row_scale(scale).reshape(-1, 1)),
            "down": quantise.int8_codes(down, scale),
            "scale": scale,
        }
        return {Plane.WHOLE: values | bias_values(tensors, torch.float32)}

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
        codes: Sections = {
            name: (torch.uint8, (rows, columns // 2))
            for name, (rows, columns) in self._dims.items()
        }
        scales: Sections = {
            f"{name}_scales": (torch.bfloat16, packing.scales_shape(layout, *dims, group_size))
            for name, dims in self._dims.items()
        }
        assert self.draft_plane is not None
        whole = codes | scales | bias_sections(shape, torch.float32)
        super().__init__(shape, layout, {self.draft_plane: whole} | dict.fromkeys(low, codes))

    def _pack(self, codes: Tensor) -> Tensor:
        return packing.pack_codes(codes, self._layout)

    def repack(self, plane: Plane, record: Tensor, source: _GroupFormat) -> Tensor:
        """Brings a record of the same format in another layout into this one's.

        Returns:
            uint8 `[record_bytes]`; the same values.
        """
        old, layout = source._records[plane], source._layout
        values = {}
        for name in self._records[plane].offsets:
            section = old.view(record, name)
            if name in self._dims:
                codes = packing.unpack_codes(section, layout, self._dims[name])
                section = self._pack(codes)
            elif name.endswith("_scales"):
                plain = packing.plain_scales(section, layout)
                section = packing.arrange_scales(plain, self._layout)
            values[name] = section
        return self._records[plane].pack(values)

    def _given_codes(self, expert: QuantisedExpert) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns each matrix's codes and its bfloat16 scales by our groups."""
        check_quantised(expert, self.shape)
        assert self.group_size is not None
        if expert.group_size % self.group_size:
            raise FormatError(
                f"Codes by groups of {expert.group_size} have no form in groups of "
                f"{self.group_size}, which share a scale here.",
                hint="Quantise the float weights instead.",
            )
        given = {}
        for name in self._dims:
            codes, scales = getattr(expert, f"{name}_codes"), getattr(expert, f"{name}_scales")
            scales = scales.repeat_interleave(expert.group_size // self.group_size, dim=1)
            given[name] = codes, scales.to(torch.bfloat16)
        return given

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
        check_all_finite(tensors)
        values = bias_values(tensors, torch.float32)
        for name, matrix in (("up", tensors.up), ("down", tensors.down)):
            quantised = quantise.quantise_int4(matrix, self.group_size)
            values[name] = self._pack(quantised.codes)
            values[f"{name}_scales"] = packing.arrange_scales(quantised.scales, self._layout)
        return {Plane.WHOLE: values}

    def encode_quantised(self, expert: QuantisedExpert) -> dict[Plane, Tensor]:
        """Packs given codes exactly; a scale of a larger group is repeated for each of ours.

        Raises:
            FormatError: As `check_quantised` says, or groups are smaller than the format's.
        """
        values: dict[str, Tensor] = {}
        for name, (codes, scales) in self._given_codes(expert).items():
            values[name] = self._pack(codes)
            values[f"{name}_scales"] = packing.arrange_scales(scales, self._layout)
        values |= bias_values(expert, torch.float32)
        record = self._records[Plane.WHOLE].pack(values)
        return {Plane.WHOLE: record}

    def _bind(self, records: Mapping[Plane, Tensor]) -> BoundExpert:
        return self.bind_draft(records[Plane.WHOLE])


class NestedFormat(_GroupFormat):
    """INT8 as two INT4 planes, of which the high one is the draft."""

    precision = Precision.NESTED
    draft_plane = Plane.HI

    def __init__(self, shape: ExpertShape, layout: Int4Layout, group_size: int) -> None:
        super().__init__(shape, layout, group_size, (Plane.LO,))

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        check_all_finite(tensors)
        high, low = bias_values(tensors, torch.float32), {}
        for name, matrix in (("up", tensors.up), ("down", tensors.down)):
            quantised = quantise.quantise_nested(matrix, self.group_size)
            hi, lo = quantise.split_planes(quantised.codes)
            high[name], low[name] = self._pack(hi), self._pack(lo)
            scales = quantised.scales * quantise.PLANE_BASE
            high[f"{name}_scales"] = packing.arrange_scales(scales, self._layout)
        return {Plane.HI: high, Plane.LO: low}

    def encode_with_high(
        self, tensors: ExpertTensors, high: QuantisedExpert
    ) -> dict[Plane, Tensor]:
        """Encodes one expert around a high plane that is given; the low plane completes it.

        A high code that is not the nearest to its weight makes a better draft (GPTQ chooses
        them so) and a worse target: `quantise.complete_planes` says by how much.

        Returns:
            uint8 `[record_bytes]` for each plane.

        Raises:
            FormatError: As `encode` and `encode_quantised` of the int4 format say.
        """
        check_tensors(tensors, self.shape)
        check_all_finite(tensors)
        assert self.group_size is not None
        upper, lower = bias_values(tensors, torch.float32), {}
        for name, (codes, scales) in self._given_codes(high).items():
            matrix = getattr(tensors, name)
            hi, lo = quantise.complete_planes(matrix, codes, scales, self.group_size)
            upper[name], lower[name] = self._pack(hi), self._pack(lo)
            upper[f"{name}_scales"] = packing.arrange_scales(scales, self._layout)
        values = {Plane.HI: upper, Plane.LO: lower}
        return {plane: record.pack(values[plane]) for plane, record in self._records.items()}

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
