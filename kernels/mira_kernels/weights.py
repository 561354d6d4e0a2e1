"""Weight matrices as views on bytes that somebody else owns.

A weight says what its tensors mean and nothing about where they came from or which
kernel reads them. Objects are cheap (built once per slot, or per expert and pass for
`NestedWeight`) and never copy. Torch only; no state; any thread.

All matrices are `[N, K]`: N outputs, K inputs. Codes of INT4 planes run from -8 to 7 and
are stored as nibbles with 8 added.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor


class Int4Layout(enum.StrEnum):
    """Order of nibbles and scales in memory; the value names it in a store's manifest.

    `ROWS` runs everywhere. The packed ones are what torch's INT4 kernel for CPUs reads,
    in blocks of as many rows as the processor's vectors ask for.
    """

    ROWS = "rows"
    CPU_PACKED_AVX2 = "cpu-packed-avx2"
    CPU_PACKED_AVX512 = "cpu-packed-avx512"

    @property
    def block_rows(self) -> int:
        """Rows interleaved in one block; N must be a multiple of it."""
        return _BLOCK_ROWS[self]

    @property
    def is_packed(self) -> bool:
        """Whether torch's INT4 kernel reads it on a processor of that kind."""
        return self is not Int4Layout.ROWS


_BLOCK_ROWS = {
    Int4Layout.ROWS: 1,
    Int4Layout.CPU_PACKED_AVX2: 32,
    Int4Layout.CPU_PACKED_AVX512: 64,
}


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """An unquantised matrix.

    Attributes:
        data: `[N, K]`, bfloat16 or float32.
    """

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs N and inputs K."""
        return self.data.shape[0], self.data.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """INT8 codes with one scale per output row or per input column.

    Attributes:
        codes: `[N, K]` int8.
        scale: bfloat16. Read in row-major order it has one entry per output row (axis 0)
            or input column (axis 1). Any shape, so that a scale shared by several rows can
            be an expanded view: `[2, R]` for rows r and R + r, `[R, 2]` for 2r and 2r + 1.
        scale_axis: 0 for output rows, 1 for input columns.
    """

    codes: Tensor
    scale: Tensor
    scale_axis: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs N and inputs K."""
        return self.codes.shape[0], self.codes.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """INT4 codes, symmetric, with one scale per group of `group_size` inputs of a row.

    Attributes:
        packed: `[N, K / 2]` uint8, two codes a byte, in the order of `layout`.
        scales: bfloat16; `[N, K / group_size]` for `ROWS`, else
            `[K / group_size, N, 2]` whose last axis is (scale, 0).
        group_size: Inputs that share a scale.
        shape: Outputs N and inputs K.
        layout: Order in memory.
    """

    packed: Tensor
    scales: Tensor
    group_size: int
    shape: tuple[int, int]
    layout: Int4Layout


@dataclass(frozen=True, slots=True, eq=False)
class NestedWeight:
    """An INT8 matrix as two INT4 planes, codes `16 * hi + lo`.

    Attributes:
        hi: The high plane, codes -7..7 (not -8: joined codes fit a signed byte), whose
            scales are 16 times those of the codes; a complete INT4 matrix of its own.
        lo: `[N, K / 2]` uint8, the low plane's codes in the same layout. Its scales are
            a sixteenth of `hi.scales`, which is exact, and are stored nowhere.
    """

    hi: Int4Weight
    lo: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs N and inputs K."""
        return self.hi.shape


Weight = DenseWeight | Int8Weight | Int4Weight | NestedWeight
"""Any weight that `mira_kernels.dispatch.linear` multiplies with."""
