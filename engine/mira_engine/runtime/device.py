"""The device of one loaded model: slots, the draft's experts, and the link that fills slots.

Built once from a memory plan. On a machine without a GPU the device is host memory under
the budget, and the link is the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.store import ExpertStore
from ..config import EngineConfig
from ..events import MemoryPlan
from ..types import DraftExperts, ExpertId, Plane
from .disk import DiskTransfer
from .slots import DraftArena, SlotArena, SlotBinder, SlotDraft, slot_planes
from .transfer import LinkThrottle


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDevice:
    """Where a model's experts are computed, and how they get there.

    Attributes:
        slots: Room for the target's records.
        draft: What a draft computes with, `None` without one.
        bind: Gives the weights of an expert in a slot.
        transfer: The link.
    """

    slots: SlotArena
    draft: DraftArena | SlotDraft | None
    bind: SlotBinder
    transfer: DiskTransfer


def make_device(
    plan: MemoryPlan,
    config: EngineConfig,
    target: ExpertStore,
    draft_source: ExpertStore,
    *,
    is_cancelled: Callable[[], bool],
) -> ExpertDevice:
    """Allocates the slots, loads the draft and opens the link.

    Raises:
        CancelledError: `is_cancelled` said so.
    """
    draft: DraftArena | SlotDraft | None = None
    is_arena = plan.num_draft_tokens > 0 and plan.draft_experts is DraftExperts.ALL
    if is_arena:
        plane = draft_source.format.draft_plane
        assert plane is not None
        draft = DraftArena(draft_source, plane, is_cancelled=is_cancelled)
    slots = SlotArena(plan.num_slots, slot_planes(target.format, has_draft=is_arena), target.format)
    if plan.num_draft_tokens and not is_arena:
        draft = SlotDraft(target.format, slots)
    link = config.link
    throttle = (
        LinkThrottle(bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
        if link.is_emulated
        else None
    )

    def locate(expert: ExpertId, plane: Plane) -> tuple[Path, int, int]:
        return target.record_location(expert.layer, plane, expert.expert)

    bind = SlotBinder(target.format, slots, draft)
    transfer = DiskTransfer(  # Last: its threads are what has to be ended by hand.
        locate=locate,
        planes=slots.planes,
        slot_buffers=slots.buffers,
        num_threads=config.num_reader_threads,
        is_direct=config.is_direct_io,
        throttle=throttle,
    )
    return ExpertDevice(
        slots=slots,
        draft=draft,
        bind=bind,
        transfer=transfer,
    )
