"""Which accelerators are here, what they can do, and what stands between them and torch.

`find_cards` asks NVIDIA's management library, which needs the driver but no CUDA build of
torch, so that a card is found beside a torch that cannot use it. What torch was built for
and what the system limits are values, looked up by `look_at_torch` and `look_at_limits`;
`accelerator_facts` draws the conclusions and is pure. Nothing is loaded or changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..config import format_bytes
from ..errors import ConfigError
from ..events import MachineFact
from ..system_memory import system_memory
from ..types import ComputeDtype, FactMark
from .host_system import WSL_LIBRARIES, HostKind, HostSystem

MIN_CAPABILITY = (7, 0)
"""Below, neither torch nor triton builds kernels any more (torch 2.13, triton 3.9)."""

BFLOAT16_CAPABILITY = (8, 0)

_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
"""Oldest Linux driver by major version of CUDA. Source: CUDA's release notes."""

_WINDOWS_DRIVER_OF_CUDA = {11: "452.39", 12: "528.33", 13: "580"}
"""The same for Windows' driver, which serves WSL 2 as well."""

_NO_TRITON = "triton, which the experts' kernels are written in, is not installed"

_USED_BY_OTHERS_BYTES = 512 << 20
_LITTLE_LOCKED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One NVIDIA card.

    Attributes:
        index: As `--gpu` counts: in the order of the slots.
        name: For people.
        total_bytes: Its memory.
        free_bytes: Of that, what nobody uses now.
        capability: Compute capability.
        link_generation: PCIe generation that card and slot can reach, 0 where unknown.
        link_width: Lanes in use now.
        max_link_width: Lanes that the card has.
        memory_bytes_per_s: What its memory does at its highest clock, 0 where unknown.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    link_generation: int = 0
    link_width: int = 0
    max_link_width: int = 0
    memory_bytes_per_s: float = 0.0

    @property
    def used_bytes(self) -> int:
        """Memory that other processes hold."""
        return self.total_bytes - self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSearch:
    """What the management library said.

    Attributes:
        cards: Those that were found.
        driver: Its version, empty without one.
        cuda: Newest CUDA that the driver runs, as `(major, minor)`.
        problem: Why nothing was found although a driver is there, or empty.
    """

    cards: tuple[Card, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What this torch was built for.

    Attributes:
        cuda: CUDA's version, empty for a build without it.
        hip: ROCm's version, likewise.
        has_cuda_device: Whether it can use a card now.
        has_mps: Whether it can use Apple's GPU now.
        has_triton: Whether kernels for cards can be compiled beside it.
    """

    cuda: str = ""
    hip: str = ""
    has_cuda_device: bool = False
    has_mps: bool = False
    has_triton: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemLimits:
    """What the system lets a process have.

    Attributes:
        locked_bytes: Memory it may pin, `None` without a limit.
        container_bytes: Memory of its container or control group, `None` without a limit.
        has_amd_driver: Whether the kernel drives an AMD GPU.
    """

    locked_bytes: int | None = None
    container_bytes: int | None = None
    has_amd_driver: bool = False


def dtype_on(capability: tuple[int, int] | None, wanted: ComputeDtype | None) -> ComputeDtype:
    """Returns the arithmetic on a device.

    Args:
        capability: Compute capability of a card, `None` for the processor.
        wanted: As asked for, `None` where nobody chose.

    Raises:
        ConfigError: The device does not compute in what was asked for.
    """
    if capability is None:
        if wanted is ComputeDtype.FLOAT16:
            raise ConfigError.for_field(
                "dtype", wanted.value, "A processor takes bfloat16 or float32; float16 takes --gpu."
            )
        return wanted or ComputeDtype.BFLOAT16
    has_bfloat16 = capability >= BFLOAT16_CAPABILITY
    if wanted is ComputeDtype.BFLOAT16 and not has_bfloat16:
        raise ConfigError.for_field(
            "dtype",
            wanted.value,
            f"A card of compute capability {capability[0]}.{capability[1]} has none: leave --dtype "
            "out, which takes float16, or give float32.",
        )
    return wanted or (ComputeDtype.BFLOAT16 if has_bfloat16 else ComputeDtype.FLOAT16)


def find_cards(nvml: ModuleType | Any | None = None) -> CardSearch:
    """Asks NVIDIA's management library for every card.

    Args:
        nvml: `pynvml` or what stands for it; `None` imports it.
    """
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return CardSearch()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # No driver is the ordinary case of a machine without a card.
        return CardSearch(problem="" if "not found" in str(error).lower() else str(error))
    try:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return CardSearch(
            cards=tuple(
                _card(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))
                for index in range(nvml.nvmlDeviceGetCount())
            ),
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=(version // 1000, version % 1000 // 10),
        )
    except nvml.NVMLError as error:
        return CardSearch(problem=str(error))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _card(nvml: Any, index: int, handle: Any) -> Card:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    link = {"link_generation": 0, "link_width": 0, "max_link_width": 0}
    # Virtual machines and some laptops do not say.
    with contextlib.suppress(nvml.NVMLError):
        link["link_generation"] = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        link["link_width"] = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        link["max_link_width"] = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    memory_bytes_per_s = 0.0
    with contextlib.suppress(nvml.NVMLError):
        megahertz = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
        # Two transfers a clock, as the library counts it for every kind of memory.
        memory_bytes_per_s = 2e6 * megahertz * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
    return Card(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total,
        free_bytes=memory.free,
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_bytes_per_s=memory_bytes_per_s,
        **link,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def look_at_torch() -> TorchBuild:
    """Asks torch what it was built for and what it sees."""
    import torch

    mps = getattr(torch.backends, "mps", None)
    return TorchBuild(
        cuda=torch.version.cuda or "",
        hip=getattr(torch.version, "hip", None) or "",
        has_cuda_device=torch.cuda.is_available(),
        has_mps=bool(mps and mps.is_available()),
        has_triton=has_triton(),
    )


def has_triton() -> bool:
    """Whether triton is installed; it has no wheel for every system."""
    return importlib.util.find_spec("triton") is not None


def look_at_limits(root: Path = Path("/")) -> SystemLimits:
    """Reads limits of this process and of its container.

    Args:
        root: Where `proc` and `sys` are.
    """
    locked: int | None = None
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = None if soft == resource.RLIM_INFINITY else soft
    return SystemLimits(
        locked_bytes=locked,
        container_bytes=system_memory(root).container_bytes,
        has_amd_driver=(root / "sys/module/amdgpu").exists() or (root / "dev/kfd").exists(),
    )


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
