"""Builds the Triton kernels for GPUs that need not be here, and tells what each takes.

Run as a program: prints one JSON document, `{kernel: {architecture: {registers, spills}}}`.
Nothing is said of arguments, so that these are the most. For two architectures kernels are also
built as a launch builds them, where all but top-k is a multiple of 16: `{aligned NAME: ...}`, with
the bytes of the narrowest copy into shared memory.
A process of its own, because triton decides between interpreter and compiler when a kernel
is decorated. Nothing is executed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from mira_kernels import triton_kernels as kernels
from mira_kernels.gpu_layer import Between, Stored
from mira_kernels.tiles import layer_constants
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 86, 89, 90, 120)
_ONE_ARCHITECTURE = (86,)
"""Of kernels that differ from others in a branch only."""
_AS_LAUNCHED = (80, 86)
"""The one that spills first, and one of the cards that are meant."""

_EVERYWHERE = (
    "up/int8",
    "down/int8",
    "up/nested",
    "down/nested",
    "draft-up/int4",
    "draft-down/int4",
    "piece-up/nested",
)
_POINTERS = {
    "x": "*bf16",
    "inner": "*bf16",
    "result": "*bf16",
    "outputs": "*bf16",
    "weights": "*bf16",
    "top_k_weights": "*bf16",
    "top_k_index": "*i64",
    "order": "*i32",
    "block_expert": "*i32",
    "block_start": "*i32",
    "expert_stop": "*i32",
    "misses": "*i32",
    "bytes8": "*u8",
    "codes8": "*i8",
    "values16": "*bf16",
    "values32": "*fp32",
    "low8": "*u8",
    "table": "*i32",
    "low_table": "*i32",
    "limit": "fp32",
    "alpha": "fp32",
}
_NEVER_ALIGNED = {"limit", "alpha", "top_k"}
_USAGE = re.compile(r"REG:(\d+).*?STACK:(\d+).*?LOCAL:(\d+)", re.DOTALL)
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x[0-9a-f]+)")

_GROUPED = {"IS_DIRECT": False, "HAS_COUNTS": False}

_FORMS = {
    "dense": (Stored.DENSE, Between.SILU_GATE, {}),
    "int8": (Stored.INT8, Between.SILU_GATE, {}),
    "int4": (Stored.INT4, Between.SILU_GATE, {"group_size": 128}),
    "nested": (Stored.NESTED, Between.SILU_GATE, {"group_size": 128}),
    "nested-clamped": (
        Stored.NESTED,
        Between.CLAMPED_GATE,
        {"group_size": 32, "is_interleaved": True, "has_bias": True},
    ),
    "int8-no-gate": (Stored.INT8, Between.SQUARED_RELU, {}),
}


def builds() -> dict[str, tuple[object, dict[str, int]]]:
    """Every kernel that is built: its function and what it is specialised by."""
    found: dict[str, tuple[object, dict[str, int]]] = {}
    for name, (stored, between, form) in _FORMS.items():
        up = layer_constants(stored, between, is_up=True, **form)
        down = layer_constants(stored, between, is_up=False, **form)
        found[f"up/{name}"] = kernels.up_kernel, up | _GROUPED | {"HAS_MISSES": False}
        found[f"down/{name}"] = kernels.down_kernel, down
    nested = layer_constants(Stored.NESTED, Between.SILU_GATE, group_size=128, is_up=True)
    found["piece-up/nested"] = kernels.up_kernel, nested | _GROUPED | {"HAS_MISSES": True}
    up, down = (
        layer_constants(Stored.INT4, Between.SILU_GATE, group_size=128, is_up=is_up)
        for is_up in (True, False)
    )
    direct = {"IS_DIRECT": True, "HAS_COUNTS": True, "HAS_MISSES": False}
    found["draft-up/int4"] = kernels.up_kernel, up | direct
    found["draft-down/int4"] = kernels.draft_down_kernel, down | {"TOP_K": 8}
    found["combine"] = kernels.combine_kernel, {"TOP_K": 8, "BLOCK_N": 256}
    return found


def build(
    function: object, constants: dict[str, int], architecture: int, *, is_aligned: bool = False
) -> dict[str, object]:
    """Compiles one kernel for one architecture. Returns its forms, from PTX to machine code."""
    names = function.arg_names
    signature = {
        name: "constexpr" if name in constants else _POINTERS.get(name, "i32") for name in names
    }
    if "draft" not in function.__name__ and constants.get("IS_DIRECT"):
        signature["block_expert"] = signature["order"] = signature["expert_stop"] = "*i64"
    aligned = [
        (index,)
        for index, name in enumerate(names)
        if is_aligned and name not in constants and name not in _NEVER_ALIGNED
    ]
    attributes = dict.fromkeys(aligned, [["tt.divisibility", 16]])
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm


def usage(cubin: bytes) -> dict[str, int]:
    """Reads what a kernel takes from its machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = _USAGE.search(text)
    assert found is not None, text
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spills": stack + local}


def narrowest_copy(ptx: str) -> int:
    """Returns the bytes of the narrowest copy from memory into shared memory."""
    return min(int(size, 16) for size in _COPY.findall(ptx))


def main() -> None:
    """Builds for the architectures that were named, else for the usual ones; prints the table."""
    asked = [int(arg) for arg in sys.argv[1:]]
    table = {}
    for name, (function, constants) in builds().items():
        wanted = asked or (ARCHITECTURES if name in _EVERYWHERE else _ONE_ARCHITECTURE)
        table[name] = {
            str(architecture): usage(build(function, constants, architecture)["cubin"])
            for architecture in wanted
        }
        if name not in _EVERYWHERE:
            continue
        by_architecture = table[f"aligned {name}"] = {}
        for architecture in asked or _AS_LAUNCHED:
            forms = build(function, constants, architecture, is_aligned=True)
            copy = {"narrowest_copy": narrowest_copy(forms["ptx"])}
            by_architecture[str(architecture)] = usage(forms["cubin"]) | copy
    print(json.dumps(table))


if __name__ == "__main__":
    main()
