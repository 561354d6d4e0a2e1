"""The device of a model on a graphics card: slots and draft there, records in host memory.

Built once from a memory plan, as `mira_engine.runtime.device` does for a machine without a
card. How host memory is filled is in `mira_engine.runtime.host_records`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..checkpoint.formats import ExpertFormat
from ..checkpoint.store import ExpertStore, StoreManifest
from ..config import EngineConfig
from ..errors import ConfigError
from ..events import MemoryPlan
from ..model.loader import TORCH_DTYPES
from ..policy.host_misses import HostSetup
from ..types import (
    CompileMode,
    ComputeDtype,
    DraftDense,
    DraftExperts,
    Precision,
)
from .card_facts import triton_hint
from .cards import dtype_on, has_triton
from .cuda_transfer import CudaTransfer
from .gpu_experts import GpuExperts
from .gpu_form import GpuForm, gpu_form
from .gpu_records import GpuArena, GpuDraft, GpuSlotDraft
from .graphs import CudaGraphs, Graphs
from .host_experts import HostExperts, measure_host
from .host_memory import Allocate, PinnedSource, pinned
from .host_records import RecordReader, Tell, card_format, host_source
from .host_system import look_at_host
from .slots import slot_planes
from .spill import CODE as SPILLED
from .spill import SpillWatch, make_watch
from .streams import CudaQueues, Queues


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHandle:
    """A card that is open.

    Attributes:
        device: As torch names it.
        queues: Its lanes.
        allocate: Takes host memory that it can copy from without waiting.
        graphs: Records its work, `None` where it cannot.
    """

    device: torch.device
    queues: Queues
    allocate: Allocate
    graphs: Graphs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """Where a model's experts are computed, and how they get there.

    Attributes:
        slots: Room for the target's records.
        draft: The resident draft, `None` without one.
        transfer: The link.
        experts: What computes them.
        handle: The card.
        host: Computes misses on the processor, `None` where it must not or cannot.
        host_setup: How fast that is.
        spill: Notices that the driver moves the card's memory, `None` where none does.
    """

    handle: GpuHandle
    slots: GpuArena
    draft: GpuDraft | GpuSlotDraft | None
    transfer: CudaTransfer
    experts: GpuExperts
    host: HostExperts | None = None
    host_setup: HostSetup | None = None
    spill: SpillWatch | None = None


def open_card(index: int) -> GpuHandle:
    """Opens a card.

    Raises:
        ConfigError: torch has no such card.
    """
    _require_card(index)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return GpuHandle(
        device=device, queues=CudaQueues(device), allocate=pinned, graphs=CudaGraphs(device)
    )


def _require_card(index: int) -> None:
    # As the management library counts them, from which doctor's numbers come.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not has_triton():
        raise ConfigError(
            "Experts cannot be computed on a card: triton is not installed.",
            hint=f"{triton_hint(look_at_host())} Without --gpu the processor computes.",
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        raise ConfigError(
            f"There is no card {index} that torch can use here.",
            hint="mira-chat doctor says which cards there are, and why one is not used.",
        )


def free_device_bytes(index: int) -> int:
    """Returns the memory of a card that nobody uses now.

    Raises:
        ConfigError: torch has no such card.
    """
    _require_card(index)
    torch.cuda.empty_cache()  # What a model before this one held counts as used until then.
    return int(torch.cuda.mem_get_info(index)[0])


def device_capability(index: int) -> tuple[int, int]:
    """Returns a card's compute capability.

    Raises:
        ConfigError: torch has no such card.
    """
    _require_card(index)
    return torch.cuda.get_device_capability(index)


def settle_dtype(config: EngineConfig) -> EngineConfig:
    """Returns a configuration with the arithmetic that its device has.

    Raises:
        ConfigError: There is no such card, or the device has not what was asked for.
    """
    if config.gpu is None:
        capability = None
    elif config.dtype in (None, ComputeDtype.BFLOAT16):
        capability = device_capability(config.gpu)
    else:
        return config  # Every card has it.
    return replace(config, dtype=dtype_on(capability, config.dtype))


def peak_device_bytes(index: int) -> int:
    """Returns the most memory of a card that this process has held."""
    return int(torch.cuda.max_memory_allocated(index))


def form_of(modules: Sequence[nn.Module], family: str, precision: Precision) -> GpuForm:
    """Returns what lies between the matrices of a model's experts.

    Raises:
        ConfigError: The kernels have no form for it, or do not read the precision.
    """
    if precision is Precision.FLOAT32:
        raise ConfigError.for_field(
            "gpu", precision, "Give another --precision, or leave --gpu out."
        )
    forms = {gpu_form(module) for module in modules}
    form = forms.pop() if len(forms) == 1 else None
    if form is None:
        raise ConfigError.for_field(
            "gpu", family, "Experts of this family have no GPU kernel: leave --gpu out."
        )
    return form


def make_gpu_device(
    handle: GpuHandle,
    plan: MemoryPlan,
    config: EngineConfig,
    target: ExpertStore,
    draft_source: ExpertStore,
    form: GpuForm,
    module: nn.Module,
    *,
    is_cancelled: Callable[[], bool],
    tell: Tell,
) -> GpuDevice:
    """Allocates slots and draft, fills host memory, and opens the link.

    Args:
        handle: The card.
        plan: Slots and draft.
        config: Readers and emulation.
        target: The target's experts.
        draft_source: Where the draft's are.
        form: What lies between their matrices.
        module: The experts of some layer, which say the same to the processor.
        is_cancelled: Asked between layers.
        tell: Told code and text of every fallback.

    Raises:
        CancelledError: `is_cancelled` said so.
        StoreError: A record cannot be read.
    """
    _tell_differences(handle, plan, config, target, tell)
    fmt, manifest = card_format(target), target.manifest
    draft = _make_draft(plan, draft_source, manifest, handle.device, is_cancelled)
    is_resident = draft is not None and not draft.is_in_slots
    planes = slot_planes(fmt, has_draft=is_resident)
    slots = GpuArena(plan.num_slots, planes, fmt, handle.device)
    spill = _watched(handle, slots, draft, tell)
    source = host_source(
        handle.allocate,
        slots.plane_bytes,
        config,
        target,
        is_cancelled=is_cancelled,
        tell=tell,
    )
    try:
        transfer = CudaTransfer(
            handle.queues, source, slots.records, bytes_per_s=config.link.bytes_per_s
        )
        experts = GpuExperts(
            fmt,
            form,
            slots,
            transfer,
            num_layers=manifest.num_layers,
            num_experts=manifest.num_experts,
            draft=draft,
            device=handle.device,
        )
    except BaseException:
        source.close()
        raise
    gpu = GpuDevice(
        handle=handle, slots=slots, draft=draft, transfer=transfer, experts=experts, spill=spill
    )
    # Beside a resident draft, host memory holds half an expert only; float16 the host has not.
    is_whole = slots.planes == fmt.planes
    if config.is_deterministic or not is_whole or config.arithmetic is ComputeDtype.FLOAT16:
        return gpu
    return _with_host(gpu, fmt, source, config, module, is_cancelled)


def _tell_differences(
    handle: GpuHandle, plan: MemoryPlan, config: EngineConfig, target: ExpertStore, tell: Tell
) -> None:
    """Tells what of the configuration and of the store is otherwise on a card."""
    if config.link.latency_s:
        tell("no-latency", "A card's link is held to a rate only: the latency is left out.")
    if plan.draft_dense is not DraftDense.TARGET and plan.num_draft_tokens:
        tell("draft-dense", "On a card the draft multiplies as the target does.")
    if handle.graphs is None or config.compile_mode is CompileMode.OFF:
        tell("uncompiled", "On this card steps are not captured: they run module by module.")
    if card_format(target) is not target.format:
        tell(
            "other-layout",
            "The store is laid out for this processor; records are laid out anew as they are read.",
        )


def _make_draft(
    plan: MemoryPlan,
    source: ExpertStore,
    manifest: StoreManifest,
    device: torch.device,
    is_cancelled: Callable[[], bool],
) -> GpuDraft | GpuSlotDraft | None:
    if not plan.num_draft_tokens:
        return None
    if plan.draft_experts is not DraftExperts.ALL:
        return GpuSlotDraft()
    plane = source.format.draft_plane
    assert plane is not None
    return GpuDraft(
        card_format(source),
        plane,
        manifest.num_layers,
        manifest.num_experts,
        RecordReader(source, is_cancelled),
        device,
    )


def _with_host(
    gpu: GpuDevice,
    fmt: ExpertFormat,
    source: PinnedSource,
    config: EngineConfig,
    module: nn.Module,
    is_cancelled: Callable[[], bool],
) -> GpuDevice:
    """Adds the processor, which computes misses from what host memory holds, and times it."""
    handle, transfer = gpu.handle, gpu.transfer
    host = HostExperts(fmt, source.held, handle.queues, handle.allocate, handle.device)
    dtype = TORCH_DTYPES[config.arithmetic]
    try:
        setup = measure_host(
            host, transfer, module, fmt.shape, dtype, source.experts, is_cancelled=is_cancelled
        )
    except BaseException:
        host.close()
        transfer.close()
        raise
    return replace(gpu, host=host, host_setup=setup)


def _watched(
    handle: GpuHandle, slots: GpuArena, draft: GpuDraft | GpuSlotDraft | None, tell: Tell
) -> SpillWatch | None:
    """Looks whether all that was allocated is on the card, and makes what looks again later."""
    arenas = [*slots.data.values()]
    if draft is not None and not draft.is_in_slots:
        arenas += draft.arena.data.values()
    watch = make_watch(look_at_host(), arenas, handle.device)
    if watch is not None and (found := watch.look_at_all()) is not None:
        tell(SPILLED, found.text)
    return watch
