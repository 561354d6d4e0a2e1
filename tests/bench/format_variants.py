"""How many bytes does an expert take in each format that is compared, and how is it made?

Question: codes and scales of one expert of the built-in model, and of the papers' models, for
every format of `formats.py`.

Method: by definition: one byte or half a byte a weight, two bytes a scale, a shorter last
group where a group does not divide the inputs.

Left out: padding of records, and the zero beside each scale of the packed layouts.

Run: python tests/bench/format_variants.py
The last line printed is one JSON document.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mira_engine.checkpoint import quantise
from mira_engine.checkpoint.expert import ExpertTensors
from mira_engine.types import ExpertShape
from torch import Tensor

SHAPES = {
    "builtin": ExpertShape(hidden_size=576, intermediate_size=512),
    "DeepSeek-V2-Lite": ExpertShape(hidden_size=2048, intermediate_size=1408),
    "Mixtral-8x7B": ExpertShape(hidden_size=4096, intermediate_size=14336),
}


@dataclass(frozen=True)
class Variant:
    """One way to store an expert.

    Attributes:
        name: For tables.
        bits: Of a code.
        scale_vectors: Entries of each vector or matrix of scales, by the expert's shape.
    """

    name: str
    bits: int
    scale_vectors: Callable[[ExpertShape], tuple[int, ...]] = lambda shape: ()

    def code_bytes(self, shape: ExpertShape) -> int:
        """Bytes of all codes."""
        return shape.num_weights * self.bits // 8

    def scale_bytes(self, shape: ExpertShape) -> tuple[int, ...]:
        """Bytes of each vector of scales."""
        return tuple(2 * entries for entries in self.scale_vectors(shape))

    def expert_bytes(self, shape: ExpertShape) -> int:
        """Bytes of one expert."""
        return self.code_bytes(shape) + sum(self.scale_bytes(shape))


def _per_row(shape: ExpertShape) -> tuple[int, ...]:
    """A vector for each of gate, up and down."""
    return (shape.intermediate_size, shape.intermediate_size, shape.hidden_size)


def _groups(size: int) -> Callable[[ExpertShape], tuple[int, ...]]:
    def entries(shape: ExpertShape) -> tuple[int, ...]:
        of_up = shape.intermediate_size * math.ceil(shape.hidden_size / size)
        of_down = shape.hidden_size * math.ceil(shape.intermediate_size / size)
        return (of_up, of_up, of_down)

    return entries


VARIANTS = (
    Variant("bf16", 16),
    Variant("int8-shared", 8, lambda shape: (shape.intermediate_size,)),
    Variant("int8-row", 8, _per_row),
    Variant("int8-128", 8, _groups(128)),
    Variant("int8-64", 8, _groups(64)),
    Variant("int8-32", 8, _groups(32)),
    Variant("nested-128", 8, _groups(128)),
    Variant("nested-64", 8, _groups(64)),
    Variant("nested-32", 8, _groups(32)),
    Variant("int4-64", 4, _groups(64)),
)
"""All that are compared. The low plane of `nested` is half of its codes, without scales."""


def quantise_wide(
    weight: Tensor, group_size: int, max_code: int, min_code: int
) -> tuple[Tensor, Tensor]:
    """Quantises `[N, K]` by groups along its inputs, the last one shorter where need be.

    Returns:
        Codes `[N, K]` int16 and a bfloat16 scale for each group, `[N, ceil(K / group_size)]`.
    """
    missing = -weight.shape[1] % group_size
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, missing))
    found = quantise.quantise_groups(padded, group_size, max_code, min_code)
    return found.codes[:, : weight.shape[1]], found.scales


def int8_by_groups(tensors: ExpertTensors, group_size: int | None) -> ExpertTensors:
    """Quantises an expert to INT8 and back.

    Args:
        tensors: The expert.
        group_size: Inputs that share a scale, `None` for a scale for each row.
    """

    def there_and_back(weight: Tensor) -> Tensor:
        num_inputs = weight.shape[1]
        size = group_size or num_inputs
        codes, scales = quantise_wide(weight, size, quantise.INT8_MAX, -quantise.INT8_MAX)
        spread = scales.to(torch.float32).repeat_interleave(size, dim=1)[:, :num_inputs]
        return codes * spread

    return ExpertTensors(
        up=there_and_back(tensors.up),
        down=there_and_back(tensors.down),
        up_bias=tensors.up_bias,
        down_bias=tensors.down_bias,
    )


def main() -> None:
    rows = {}
    print(("{:<14}" + "{:>20}" * len(SHAPES)).format("", *SHAPES))
    for variant in VARIANTS:
        sizes = {name: variant.expert_bytes(shape) for name, shape in SHAPES.items()}
        rows[variant.name] = sizes
        print(("{:<14}" + "{:>20,}" * len(SHAPES)).format(variant.name, *sizes.values()))
    print(json.dumps({"bench": "format_variants", "expert_bytes": rows}))


if __name__ == "__main__":
    main()
