"""The device of a model on a graphics card: slots and draft there, records in host memory.

Built once from a memory plan, as `mira_engine.runtime.device` does for a machine without a
card. Host memory takes as many records as it may, pinned as far as the system allows; the
rest stays on the disk and passes through a ring of buffers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mira_kernels.weights import Int4Layout
from torch import Tensor, nn

from ..checkpoint.formats import ExpertFormat, make_format
from ..checkpoint.store import ExpertStore
from ..config import EngineConfig, format_bytes
from ..errors import ConfigError, check_cancelled
from ..events import MemoryPlan
from ..model.loader import TORCH_DTYPES
from ..policy.host_misses import HostSetup
from ..system_memory import system_memory
from ..types import (
    CompileMode,
    ComputeDtype,
    DraftDense,
    DraftExperts,
    ExpertId,
    Plane,
    Precision,
)
from .cards import dtype_on, has_triton, look_at_limits, triton_hint
from .cuda_transfer import CudaTransfer
from .disk import cannot_open, open_for_records, read_exactly
from .gpu_experts import GpuExperts
from .gpu_form import GpuForm, gpu_form
from .gpu_records import GpuArena, GpuDraft, GpuSlotDraft
from .graphs import CudaGraphs, Graphs
from .host_experts import HostExperts, measure_host
from .host_memory import Allocate, PinnedSource, RingSource, allocate_chunks, pageable, pinned
from .host_system import look_at_host
from .slots import slot_planes
from .spill import CODE as SPILLED
from .spill import SpillWatch, make_watch
from .streams import CudaQueues, Queues

HOST_SHARE = 0.8
"""Of the free host memory, what records may take: the system needs some for itself."""

NUM_RING_BUFFERS = 8
_ALIGNMENT = 4096

Tell = Callable[[str, str], None]


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
    manifest, device = target.manifest, handle.device
    if config.link.latency_s:
        tell("no-latency", "A card's link is held to a rate only: the latency is left out.")
    if plan.draft_dense is not DraftDense.TARGET and plan.num_draft_tokens:
        tell("draft-dense", "On a card the draft multiplies as the target does.")
    if handle.graphs is None or config.compile_mode is CompileMode.OFF:
        tell("uncompiled", "On this card steps are not captured: they run module by module.")
    fmt = _card_format(target)
    if fmt is not target.format:
        tell(
            "other-layout",
            "The store is laid out for this processor; records are laid out anew as they are read.",
        )
    draft: GpuDraft | GpuSlotDraft | None = None
    is_resident = plan.num_draft_tokens > 0 and plan.draft_experts is DraftExperts.ALL
    if is_resident:
        plane = draft_source.format.draft_plane
        assert plane is not None
        draft = GpuDraft(
            _card_format(draft_source),
            plane,
            manifest.num_layers,
            manifest.num_experts,
            _Reader(draft_source, config, is_cancelled),
            device,
        )
    elif plan.num_draft_tokens:
        draft = GpuSlotDraft()
    planes = slot_planes(fmt, has_draft=is_resident)
    slots = GpuArena(plan.num_slots, planes, fmt, device)
    spill = _watched(handle, slots, draft, tell)
    source = _host_source(handle, slots, config, target, is_cancelled, tell)
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
            device=device,
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
    host = HostExperts(fmt, source.held, handle.queues, handle.allocate, device)
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


def _card_format(store: ExpertStore) -> ExpertFormat:
    """The store's format in the layout that kernels on a card read."""
    fmt = store.format
    if fmt.block_rows == 1:
        return fmt
    return make_format(fmt.precision, fmt.shape, layout=Int4Layout.ROWS.value)


class _Reader:
    """Reads one record after another from a store, in the card's layout, to where it is wanted."""

    def __init__(
        self, store: ExpertStore, config: EngineConfig, is_cancelled: Callable[[], bool]
    ) -> None:
        self._store = store
        self._is_cancelled = is_cancelled
        self._layer = -1
        self._format = _card_format(store)

    def __call__(self, expert: ExpertId, plane: Plane, target: Tensor) -> None:
        if expert.layer != self._layer:
            self._layer = expert.layer
            check_cancelled(self._is_cancelled)
        path, offset, num_bytes = self._store.record_location(expert.layer, plane, expert.expert)
        is_other = self._format is not self._store.format
        is_host = target.device.type == "cpu" and not is_other
        buffer = target if is_host else pageable(num_bytes)
        try:
            fd, _ = open_for_records(Path(path), is_direct=False)
        except OSError as error:
            raise cannot_open(Path(path), error.strerror) from error
        try:
            read_exactly(fd, memoryview(buffer.numpy()), offset, Path(path))
        finally:
            os.close(fd)
        if is_other:
            buffer = self._format.repack(plane, buffer, self._store.format)
        if not is_host:
            target.copy_(buffer)


def _host_source(
    handle: GpuHandle,
    slots: GpuArena,
    config: EngineConfig,
    target: ExpertStore,
    is_cancelled: Callable[[], bool],
    tell: Tell,
) -> PinnedSource:
    manifest = target.manifest
    experts = [
        ExpertId(layer, expert)
        for layer in range(manifest.num_layers)
        for expert in range(manifest.num_experts)
    ]
    record_bytes = sum(slots.plane_bytes.values())
    wanted = len(experts) * record_bytes
    # A container that is full is killed: pinned memory cannot be taken from it again.
    free = int(HOST_SHARE * system_memory().available_bytes)
    room = min(wanted, free // record_bytes * record_bytes)
    chunks = allocate_chunks(room, record_bytes, handle.allocate)
    held = sum(chunk.numel() for chunk in chunks)
    if held < room:
        tell(
            "pinned-memory",
            f"Only {format_bytes(held)} of {format_bytes(room)} could be pinned; the rest is "
            f"copied from ordinary memory, more slowly.{_pin_limit(room)}",
        )
        chunks += allocate_chunks(room - held, record_bytes, pageable)
        held = sum(chunk.numel() for chunk in chunks)
    below = None
    if held < wanted:
        tell(
            "host-memory",
            f"Host memory holds {format_bytes(held)} of {format_bytes(wanted)} of experts; the "
            "others come from the disk.",
        )
        below = _ring(handle, slots, config, target)
    load = _Reader(target, config, is_cancelled)
    try:
        return PinnedSource(chunks, experts, slots.plane_bytes, load, below)
    except BaseException:
        if below is not None:
            below.close()
        raise


def _pin_limit(wanted_bytes: int) -> str:
    """What the system says of pinned memory, where that explains that there was too little."""
    if look_at_host().kind.is_wddm:
        return " Windows lets a program pin about half of the computer's memory."
    locked = look_at_limits().locked_bytes
    if locked is None or locked >= wanted_bytes:
        return ""
    return f" A process may lock {format_bytes(locked)} here: ulimit -l unlimited lifts that."


def _never() -> bool:
    return False


def _ring(
    handle: GpuHandle, slots: GpuArena, config: EngineConfig, target: ExpertStore
) -> RingSource:
    def locate(expert: ExpertId, plane: Plane) -> tuple[Path, int, int]:
        return target.record_location(expert.layer, plane, expert.expert)

    record_bytes = sum(slots.plane_bytes.values())
    buffers = [_aligned(handle.allocate, record_bytes) for _ in range(NUM_RING_BUFFERS)]
    return RingSource(
        locate,
        slots.plane_bytes,
        buffers,
        num_threads=config.num_reader_threads,
        is_direct=config.is_direct_io,
        read=None if _card_format(target) is target.format else _Reader(target, config, _never),
    )


def _aligned(allocate: Allocate, num_bytes: int) -> Tensor:
    """Takes host memory that begins on a page, as direct reads ask for."""
    try:
        whole = allocate(num_bytes + _ALIGNMENT)
    except (RuntimeError, MemoryError):
        whole = pageable(num_bytes + _ALIGNMENT)
    start = -whole.data_ptr() % _ALIGNMENT
    return whole[start : start + num_bytes]
