"""Tiny checkpoints in the forms that publishers store big ones in.

Owns the writing of quantised weights: FP8 with scales by block, MXFP4, and GPTQ's codes. Each
function rewrites a float checkpoint in place, under the names and in the shapes of the
published ones, and the values that stored tensors stand for are written out here in plain
loops, apart from the engine's own arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

WEIGHTS = "model.safetensors"
BLOCK = (128, 128)
FP8_FIELDS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
MXFP4_FIELDS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
GPTQ_FIELDS = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_KEPT = ("embed", "lm_head", "norm", ".gate.", ".router.")
"""Parts of the names of matrices that FP8 checkpoints leave in bfloat16."""


def save_shaped(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **fields: object,
) -> Path:
    """Writes a random checkpoint of a tiny family with other dimensions."""
    config = tiny_models.tiny_config(family)
    named = {config.attribute_map.get(name, name): value for name, value in fields.items()}
    config = type(config).from_dict(config.to_dict() | named)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.2 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Replaces the tensors of a single-file checkpoint by what `change` makes of them."""
    tensors = change(load_file(folder / WEIGHTS))
    made = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(made, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def set_quantisation(folder: Path, fields: Mapping[str, object] | None) -> Path:
    """Writes the part of `config.json` about stored weights, or takes it out."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    if fields is not None:
        config["quantization_config"] = dict(fields)
    path.write_text(json.dumps(config))
    return folder


def to_fp8(folder: Path, *, suffix: str = "_scale_inv", block: tuple[int, int] | None = BLOCK):
    """Stores every linear layer in FP8; `block` of `None` gives each matrix one scale."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if tensor.ndim not in (2, 3) or any(part in key for part in _KEPT):
                made[key] = tensor
                continue
            values, scales = fp8_of(tensor, block or tuple(tensor.shape[-2:]))
            made[key] = values
            made[key + suffix] = scales if block else scales.reshape(())
        return made

    rewrite(folder, change)
    return set_quantisation(folder, FP8_FIELDS | {"weight_block_size": block and list(block)})


def fp8_of(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Quantises a matrix, or each of a stack, by blocks: float8 like it, and float32 scales."""
    if weight.ndim == 3:
        pairs = [fp8_of(matrix, block) for matrix in weight]
        return torch.stack([v for v, _ in pairs]), torch.stack([s for _, s in pairs])
    rows, columns = weight.shape
    grid = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(grid)
    for row, column in ((r, c) for r in range(grid[0]) for c in range(grid[1])):
        at = _block_at(row, column, block)
        scales[row, column] = weight[at].float().abs().max() / 448
        values[at] = (weight[at].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def fp8_values(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The bfloat16 values that FP8 values and scales stand for, one block at a time."""
    if values.ndim == 3:
        pairs = zip(values, scales, strict=True)
        return torch.stack([fp8_values(matrix, grid, block) for matrix, grid in pairs])
    made = torch.empty(values.shape, dtype=torch.bfloat16)
    for row, column in ((r, c) for r in range(scales.shape[0]) for c in range(scales.shape[1])):
        at = _block_at(row, column, block)
        made[at] = (values[at].float() * scales[row, column]).to(torch.bfloat16)
    return made


def _block_at(row: int, column: int, block: tuple[int, int]) -> tuple[slice, slice]:
    return (
        slice(row * block[0], (row + 1) * block[0]),
        slice(column * block[1], (column + 1) * block[1]),
    )


def fp8_to_float(folder: Path) -> Path:
    """Undoes `to_fp8` with scales by block, in bfloat16."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: (
                fp8_values(tensor, tensors[f"{key}_scale_inv"], BLOCK)
                if f"{key}_scale_inv" in tensors
                else tensor
            )
            for key, tensor in tensors.items()
            if not key.endswith("_scale_inv")
        }

    rewrite(folder, change)
    return set_quantisation(folder, None)


def to_mxfp4(folder: Path, *, seed: int = 0) -> Path:
    """Stores the experts of a gpt_oss checkpoint in MXFP4, with random values."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                made[key] = tensor
                continue
            num_experts, num_inputs, num_outputs = tensor.shape
            grid = (num_experts, num_outputs, num_inputs // 32)
            random = torch.randint(0, 256, (*grid, 16), generator=generator)
            made[f"{key}_blocks"] = random.to(torch.uint8)
            exponents = torch.randint(121, 125, grid, generator=generator)
            made[f"{key}_scales"] = exponents.to(torch.uint8)
        return made

    rewrite(folder, change)
    return set_quantisation(folder, MXFP4_FIELDS)


def mxfp4_to_float(folder: Path) -> Path:
    """Undoes `to_mxfp4`, in bfloat16."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if key.endswith("_blocks"):
                name = key.removesuffix("_blocks")
                made[name] = mxfp4_values(tensor, tensors[f"{name}_scales"]).transpose(1, 2)
            elif not key.endswith("_scales"):
                made[key] = tensor
        return made

    rewrite(folder, change)
    return set_quantisation(folder, None)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """The bfloat16 `[..., N, K]` that MXFP4 stands for, by arithmetic on each half of a byte."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    magnitudes = torch.tensor(FP4, dtype=torch.float64)[halves & 7]
    signs = 1.0 - 2.0 * (halves >> 3)
    powers = torch.pow(torch.tensor(2.0, dtype=torch.float64), scales.double() - 127)
    return (signs * magnitudes * powers[..., None]).flatten(-2).to(torch.bfloat16)


def to_gptq(folder: Path, *, group_size: int = 128, zero: int = 7, **fields: object) -> Path:
    """Stores the experts of a checkpoint with one matrix each as GPTQ does.

    Rounds to nearest: how codes are chosen is not what is read here.

    Args:
        folder: The checkpoint.
        group_size: Inputs that share a scale, -1 for whole rows.
        zero: What is stored as zero point: 7 in the first version, 8 in the second.
        **fields: Changes of the configuration.
    """

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if ".experts." not in key:
                made[key] = tensor
                continue
            name = key.removesuffix(".weight")
            codes, scales = gptq_codes(tensor, group_size)
            made |= gptq_tensors(name, codes, scales, group_size, zero)
        return made

    rewrite(folder, change)
    return set_quantisation(folder, GPTQ_FIELDS | {"group_size": group_size} | fields)


def gptq_codes(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes int8 `[N, K]`, -8 to 7, and float16 scales `[N, G]`."""
    rows, columns = weight.shape
    group = columns if group_size == -1 else group_size
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(rows, math.ceil(columns / group), dtype=torch.float16)
    for number, start in enumerate(range(0, columns, group)):
        part = weight[:, start : start + group].float()
        scales[:, number] = part.abs().amax(dim=1) / 7.5
        rounded = torch.round(part / scales[:, number, None].float()).clamp(-8, 7)
        codes[:, start : start + group] = rounded.to(torch.int8)
    return codes, scales


def gptq_tensors(
    name: str, codes: Tensor, scales: Tensor, group_size: int, zero: int
) -> dict[str, Tensor]:
    """Packs codes `[N, K]` under GPTQ's names, eight to a word along the inputs."""
    num_outputs, num_inputs = codes.shape
    group = num_inputs if group_size == -1 else group_size
    words = torch.zeros(num_inputs // 8, num_outputs, dtype=torch.int64)
    for shift in range(8):
        words |= (codes[:, shift::8].t().long() + 8) << (4 * shift)
    zeros = torch.full((scales.shape[1], num_outputs // 8), int(f"{zero:x}" * 8, 16))
    return {
        f"{name}.qweight": _as_int32(words),
        f"{name}.scales": scales.t(),
        f"{name}.qzeros": _as_int32(zeros),
        f"{name}.g_idx": (torch.arange(num_inputs) // group).to(torch.int32),
    }


def _as_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
