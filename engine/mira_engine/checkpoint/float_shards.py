"""A checkpoint whose weights are quantised, read as if it held bfloat16.

Pairs stored values with their scales, and shows each pair under the key, shape and order
that the float form of the model has; everything else passes through. So a family's own key
mapping and conversions work on it unchanged. A read takes the bytes of what is asked for
and of its scales, no more. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedModelError
from .dequantise import (
    MXFP4_GROUP,
    dequantise_fp8,
    dequantise_mxfp4,
    grid_of,
    scales_to_float,
)
from .quantisation import Quantisation, StoredForm
from .shards import CheckpointShards, TensorLocation

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP8_SCALES = ("_scale_inv", "_scale")
"""What follows a weight's key in its scale's; both are multiplied by."""
_ROWS_OF_ONE_SCALE = 128
"""Rows that are converted at once where a single scale is for the whole matrix."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_DAMAGED = "Download the checkpoint again."


def as_float(
    stored: CheckpointShards, quantisation: Quantisation | None
) -> CheckpointShards | FloatShards:
    """Returns a checkpoint's tensors as float ones: as they are, or unpacked when read.

    Raises:
        CheckpointError: As `FloatShards` says.
        UnsupportedModelError: The stored form is not read.
    """
    return stored if quantisation is None else FloatShards(stored, quantisation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blockwise:
    """FP8: a matrix or a stack of them, with one scale for each block.

    Attributes:
        values: Key of the stored values.
        scales: Key of their scales.
        shape: Dimensions of the float tensor.
        block: Rows and columns that share a scale.
        has_one_scale: Whether a single scale is for all blocks.
    """

    values: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    has_one_scale: bool = False

    @property
    def num_rows_together(self) -> int:
        """Rows of the first dimension that can only be read together."""
        return self.block[0] if len(self.shape) == 2 else 1

    def read(self, stored: CheckpointShards, start: int, stop: int) -> Tensor:
        """Reads rows of the first dimension from a multiple of `num_rows_together`."""
        values = stored.read_rows(self.values, start, stop)
        if self.has_one_scale:
            grid = grid_of(*values.shape[-2:], self.block)
            scales = _finite_scales(stored, self.scales, stored.read(self.scales)).reshape(1, 1)
            scales = scales.expand(*values.shape[:-2], *grid)
        else:
            step = self.num_rows_together
            scales = stored.read_rows(self.scales, start // step, -(-stop // step))
            scales = _finite_scales(stored, self.scales, scales)
        return dequantise_fp8(values, scales, self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microscaled:
    """MXFP4: a stack of matrices, stored `[out, in]` and shown `[in, out]`.

    The float form of the families that come this way is transposed. Attributes as
    `_Blockwise`.
    """

    values: str
    scales: str
    shape: tuple[int, ...]
    num_rows_together: int = 1

    def read(self, stored: CheckpointShards, start: int, stop: int) -> Tensor:
        """Reads matrices of the stack."""
        scales = stored.read_rows(self.scales, start, stop)
        values = dequantise_mxfp4(
            stored.read_rows(self.values, start, stop),
            _finite_scales(stored, self.scales, scales),
        )
        return values.transpose(-1, -2)


_Packed = _Blockwise | _Microscaled


class FloatShards(Mapping[str, TensorLocation]):
    """The tensors of a quantised checkpoint by the keys of its float form.

    A location's path and offset are those of the stored values, its dtype, shape and length
    those of the float tensor.

    Raises:
        CheckpointError: Values without scales, or scales of another shape than the values
            need. The message names the tensor and the file.
        UnsupportedModelError: The stored form is not read.
    """

    def __init__(self, stored: CheckpointShards, quantisation: Quantisation) -> None:
        self.folder = stored.folder
        self._stored = stored
        if quantisation.form is StoredForm.FP8:
            self._packed = _pair_fp8(stored, quantisation.block_size)
        elif quantisation.form is StoredForm.MXFP4:
            self._packed = _pair_mxfp4(stored)
        else:
            raise UnsupportedModelError(
                f"Weights quantised with {quantisation.method} are not read as float ones.",
                hint="Pick the float form of the model.",
            )
        shown = {packed.values: key for key, packed in self._packed.items()}
        hidden = {packed.scales for packed in self._packed.values()}
        self._locations: dict[str, TensorLocation] = {}
        for key, where in stored.items():
            if key in shown:
                shape = self._packed[shown[key]].shape
                self._locations[shown[key]] = replace(
                    where,
                    dtype=torch.bfloat16,
                    shape=shape,
                    num_bytes=math.prod(shape) * torch.bfloat16.itemsize,
                )
            elif key not in hidden:
                self._locations[key] = where

    def __getitem__(self, key: str) -> TensorLocation:
        return self._locations[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def read(self, key: str, row: int | None = None) -> Tensor:
        """Reads one tensor, or with `row` only `tensor[row : row + 1]`, in bfloat16.

        Raises:
            CheckpointError: A file is shorter than it was or cannot be read, or a scale is nan
                or infinity.
        """
        packed = self._packed.get(key)
        if packed is None:
            return self._stored.read(key, row)
        if row is None:
            return packed.read(self._stored, 0, packed.shape[0])
        step = packed.num_rows_together
        start = row // step * step
        rows = packed.read(self._stored, start, min(start + step, packed.shape[0]))
        return rows[row - start : row - start + 1]

    def pieces(self, key: str, piece_bytes: int = 64 << 20) -> Iterator[Tensor]:
        """Reads one tensor's float bytes in order, uint8, at most about `piece_bytes` at a time.

        Raises:
            CheckpointError: As `read` says.
        """
        packed = self._packed.get(key)
        if packed is None:
            yield from self._stored.pieces(key, piece_bytes)
            return
        num_rows, step = packed.shape[0], packed.num_rows_together
        row_bytes = self[key].num_bytes // num_rows
        at_once = max(piece_bytes // (step * row_bytes), 1) * step
        for start in range(0, num_rows, at_once):
            rows = packed.read(self._stored, start, min(start + at_once, num_rows))
            yield rows.contiguous().reshape(-1).view(torch.uint8)

    def shard_of(self, key: str) -> str:
        """Returns the name of the shard that holds a tensor's values."""
        return self._stored.shard_of(self._values_of(key))

    @property
    def may_be_absent(self) -> bool:
        """Whether shards need not be here: they come one after another."""
        return self._stored.may_be_absent

    @property
    def is_split(self) -> bool:
        """Whether some tensor has its values in one shard and its scales in another."""
        stored = self._stored
        return any(
            stored.shard_of(packed.values) != stored.shard_of(packed.scales)
            for packed in self._packed.values()
        )

    def _values_of(self, key: str) -> str:
        packed = self._packed.get(key)
        return key if packed is None else packed.values

    def fingerprint(self) -> str:
        """As `CheckpointShards.fingerprint`: of the files as they are stored."""
        return self._stored.fingerprint()


def _pair_fp8(stored: CheckpointShards, block: tuple[int, int] | None) -> dict[str, _Packed]:
    """Finds the scales of every FP8 tensor."""
    packed: dict[str, _Packed] = {}
    for key, where in stored.items():
        if where.dtype not in _FP8:
            continue
        scales = next((key + end for end in _FP8_SCALES if key + end in stored), None)
        if scales is None:
            raise CheckpointError(
                f"{where.path} holds the FP8 tensor {key}, but no file its scales.", hint=_DAMAGED
            )
        packed[key] = _blockwise(stored, key, scales, block)
    return packed


def _blockwise(
    stored: CheckpointShards, key: str, scales: str, block: tuple[int, int] | None
) -> _Blockwise:
    shape, found = stored[key].shape, stored[scales].shape
    if len(shape) not in (2, 3) or 0 in shape:
        raise CheckpointError(
            f"{stored[key].path} holds the FP8 tensor {key} of shape {shape}, which is no matrix.",
            hint=_DAMAGED,
        )
    # A grid of one block has one scale as well, but `[1, 1]` may also be a grid that is cut off.
    if found in ((), (1,)) or (block is None and math.prod(found) == 1):
        rows = (_ROWS_OF_ONE_SCALE, shape[-1])
        return _Blockwise(values=key, scales=scales, shape=shape, block=rows, has_one_scale=True)
    block = block or (shape[-2], shape[-1])
    expected = (*shape[:-2], *grid_of(shape[-2], shape[-1], block))
    if found != expected:
        raise CheckpointError(
            f"{stored[scales].path} holds {scales} of shape {found}; {key} of shape {shape} needs "
            f"{expected}.",
            hint=_DAMAGED,
        )
    return _Blockwise(values=key, scales=scales, shape=shape, block=block)


def _pair_mxfp4(stored: CheckpointShards) -> dict[str, _Packed]:
    """Finds the scales of every MXFP4 tensor."""
    packed: dict[str, _Packed] = {}
    for key, where in stored.items():
        if not key.endswith(_BLOCKS):
            continue
        name = key.removesuffix(_BLOCKS)
        scales = name + _SCALES
        if scales not in stored:
            raise CheckpointError(
                f"{where.path} holds the MXFP4 tensor {key}, but no file its scales.",
                hint=_DAMAGED,
            )
        half = MXFP4_GROUP // 2
        is_stack = where.dtype is torch.uint8 and len(where.shape) == 4 and where.shape[3] == half
        if not is_stack or stored[scales].shape != where.shape[:3]:
            raise CheckpointError(
                f"{where.path} holds {key} of shape {where.shape} and {stored[scales].path} "
                f"{scales} of shape {stored[scales].shape}, which do not fit each other.",
                hint=_DAMAGED,
            )
        num_experts, num_outputs, num_groups, _ = where.shape
        shape = (num_experts, num_groups * MXFP4_GROUP, num_outputs)
        packed[name] = _Microscaled(values=key, scales=scales, shape=shape)
    return packed


def _finite_scales(stored: CheckpointShards, key: str, scales: Tensor) -> Tensor:
    values = scales_to_float(scales)
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(
            f"{stored[key].path} holds nan or infinity in the scales {key}.", hint=_DAMAGED
        )
    return values
