"""Which cards are here, what torch was built for, and what the system lets a process have.

`find_cards` asks NVIDIA's management library, which needs the driver but no CUDA build of
torch, so that a card is found beside a torch that cannot use it. All that is found is values;
`mira_engine.runtime.card_facts` draws the conclusions. Nothing is loaded or changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from ..system_memory import system_memory
from ..types import ComputeDtype

MIN_CAPABILITY = (7, 0)
"""Below, neither torch nor triton builds kernels any more (torch 2.13, triton 3.9)."""

BFLOAT16_CAPABILITY = (8, 0)


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
