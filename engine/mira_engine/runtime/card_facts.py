"""What stands between the accelerators that are here and torch, and what to do about it.

Draws conclusions from what `mira_engine.runtime.cards` found, and is pure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ..config import format_bytes
from ..events import MachineFact
from ..types import FactMark
from .cards import (
    BFLOAT16_CAPABILITY,
    MIN_CAPABILITY,
    Card,
    CardSearch,
    SystemLimits,
    TorchBuild,
)
from .host_system import WSL_LIBRARIES, HostKind, HostSystem

_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Oldest Linux driver by major version of CUDA. Source: CUDA's release notes."""

_WINDOWS_DRIVER_OF_CUDA = {11: "452.39", 12: "528.33", 13: "580"}
"""The same for Windows' driver, which serves WSL 2 as well."""

_NO_TRITON = "triton, which the experts' kernels are written in, is not installed"

_USED_BY_OTHERS_BYTES = 512 << 20
_LITTLE_LOCKED_BYTES = 1 << 30


def accelerator_facts(
    search: CardSearch,
    build: TorchBuild,
    limits: SystemLimits,
    *,
    is_used: bool,
    host: HostSystem,
) -> Iterator[MachineFact]:
    """Says of every accelerator whether it can be used, and what to do where it cannot.

    Args:
        search: The NVIDIA cards.
        build: What torch can.
        limits: What the system allows.
        is_used: Whether a card was asked for.
        host: The system.
    """
    if search.problem:
        yield MachineFact(
            code="gpu",
            text=f"NVIDIA's driver does not answer: {search.problem}",
            mark=FactMark.PROBLEM,
            hint="Remove NVIDIA's Linux driver from WSL, where only Windows' driver works."
            if host.kind is HostKind.WSL
            else "Install the driver again, or restart the machine after an update of it.",
        )
    for card in search.cards:
        yield from _card_facts(card, search, build, host, is_used=is_used)
    if not search.cards and not search.problem:
        yield _other_accelerator(build, limits, host)
    yield _pinned(limits, is_needed=bool(search.cards) and is_used)
    if limits.container_bytes is not None:
        yield MachineFact(
            code="container-memory",
            text=f"this container or control group may hold {format_bytes(limits.container_bytes)}",
            mark=FactMark.NOTE,
            hint="All that the program holds in memory counts towards it, experts too.",
            value=float(limits.container_bytes),
        )


def _card_facts(
    card: Card, search: CardSearch, build: TorchBuild, host: HostSystem, *, is_used: bool
) -> Iterator[MachineFact]:
    code = f"gpu-{card.index}"
    about = (
        f"{card.name}, {format_bytes(card.free_bytes)} free of {format_bytes(card.total_bytes)}, "
        f"compute capability {card.capability[0]}.{card.capability[1]}"
    )
    problem = _card_problem(card, search, build, host)
    if problem is not None:
        text, hint = problem
        yield MachineFact(code=code, text=f"{about}: {text}", mark=FactMark.PROBLEM, hint=hint)
        return
    if is_used:
        yield MachineFact(code=code, text=about, value=float(card.free_bytes))
    else:
        yield MachineFact(
            code=code,
            text=f"{about}; not used: the CPU computes",
            mark=FactMark.NOTE,
            hint=f"--gpu {card.index} computes on it; how fast that is was never measured.",
            value=float(card.free_bytes),
        )
    if card.capability < BFLOAT16_CAPABILITY:
        yield MachineFact(
            code=f"{code}-bfloat16",
            text="no bfloat16 before compute capability 8.0: float16 is taken, and float32 once a "
            "number grows too large for it",
            mark=FactMark.NOTE,
            hint="--dtype float32 begins with it, in twice the memory for what is no expert.",
        )
    if card.used_bytes > _USED_BY_OTHERS_BYTES:
        yield MachineFact(
            code=f"{code}-others",
            text=f"other programs hold {format_bytes(card.used_bytes)} of it",
            mark=FactMark.NOTE,
            hint="Close them for more experts on the card; nvidia-smi names them.",
            value=float(card.used_bytes),
        )
    if 0 < card.link_width < card.max_link_width:
        yield MachineFact(
            code=f"{code}-link",
            text=f"PCIe {card.link_generation}.0 with {card.link_width} of "
            f"{card.max_link_width} lanes",
            mark=FactMark.NOTE,
            hint="The slot or a riser gives fewer lanes: another slot loads experts faster.",
        )


def _card_problem(
    card: Card, search: CardSearch, build: TorchBuild, host: HostSystem
) -> tuple[str, str] | None:
    """Why torch cannot use a card, and what to do."""
    if card.capability < MIN_CAPABILITY:
        return "too old for torch and triton", "A card of 2017 or later is needed."
    if not build.cuda:
        return (
            "this torch was built without CUDA",
            "Install torch's CUDA build into this environment, then start again.",
        )
    needed = int(build.cuda.partition(".")[0])
    if search.cuda[0] < needed:
        oldest = (_WINDOWS_DRIVER_OF_CUDA if host.kind.is_wddm else _DRIVER_OF_CUDA).get(needed)
        wanted = f"driver {oldest} or newer" if oldest else "newest driver"
        return (
            f"driver {search.driver} is too old for torch's CUDA {build.cuda}",
            f"Install NVIDIA's {wanted}{' in Windows' if host.kind is HostKind.WSL else ''}, or a "
            f"torch built for CUDA {search.cuda[0]}.",
        )
    if not build.has_cuda_device:
        return "torch does not see it", f"Look at CUDA_VISIBLE_DEVICES{_who_may_open(host)}."
    if not build.has_triton:
        return _NO_TRITON, triton_hint(host)
    return None


def _who_may_open(host: HostSystem) -> str:
    if host.kind is HostKind.WSL:
        return f", at who may open /dev/dxg, and whether {WSL_LIBRARIES} is in LD_LIBRARY_PATH"
    return "" if host.kind is HostKind.WINDOWS else ", and at who may open /dev/nvidia*"


def triton_hint(host: HostSystem) -> str:
    """Says how triton gets here."""
    if host.kind is HostKind.WINDOWS:
        return "Run mira-chat in WSL 2, or install triton-windows, which was not tried."
    return "Install triton into this environment: pip install triton."


def _other_accelerator(build: TorchBuild, limits: SystemLimits, host: HostSystem) -> MachineFact:
    if build.hip:
        return MachineFact(
            code="gpu",
            text=f"AMD, torch built for ROCm {build.hip}; not used: the CPU computes",
            mark=FactMark.NOTE,
            hint="Experts' kernels are written for NVIDIA so far.",
        )
    if limits.has_amd_driver:
        return MachineFact(
            code="gpu",
            text="AMD, which this torch cannot use; the CPU computes",
            mark=FactMark.NOTE,
            hint="Experts' kernels are written for NVIDIA so far.",
        )
    if build.has_mps or sys.platform == "darwin":
        return MachineFact(
            code="gpu",
            text="Apple's, not used: the CPU computes, with the same memory",
            mark=FactMark.NOTE,
            hint="Models larger than the memory run from the disk.",
        )
    text = "none that torch can use; the CPU computes"
    if host.kind is not HostKind.WSL:
        return MachineFact(code="gpu", text=text)
    if host.has_wsl_driver:
        hint = f"Windows' driver is here: put {WSL_LIBRARIES} into LD_LIBRARY_PATH."
    else:
        hint = (
            "If there is an NVIDIA card: install its driver in Windows (none in WSL), then "
            "wsl --shutdown."
        )
    return MachineFact(code="gpu", text=text, mark=FactMark.NOTE, hint=hint)


def _pinned(limits: SystemLimits, *, is_needed: bool) -> MachineFact:
    if not is_needed:
        return MachineFact(
            code="pinned-memory", text="none: only a GPU's link needs it, and none is used"
        )
    if limits.locked_bytes is None:
        return MachineFact(code="pinned-memory", text="the system sets no limit")
    is_little = limits.locked_bytes < _LITTLE_LOCKED_BYTES
    return MachineFact(
        code="pinned-memory",
        text=f"a process may lock {format_bytes(limits.locked_bytes)} (memlock)",
        mark=FactMark.NOTE if is_little else FactMark.OK,
        hint="CUDA pins past this limit on most systems; where it does not, raise it: "
        "ulimit -l unlimited."
        if is_little
        else "",
        value=float(limits.locked_bytes),
    )
