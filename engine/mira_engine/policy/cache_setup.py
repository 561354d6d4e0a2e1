"""What a driver of the expert cache is set up with: numbers that a plan has settled. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import CacheMode, Eviction
from .host_misses import HostSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """All that a driver's answers depend on beside what it observes.

    Attributes:
        num_layers: MoE layers.
        num_experts: Routed experts of a layer.
        top_k: Experts of a token in a layer.
        num_slots: Slots of the device.
        eviction: Which resident experts are given up first; with regions, those of STAGE.
        record_bytes: Bytes moved for one expert.
        num_links: Records that move at the same time.
        num_reserved_slots: Slots that a prefetch leaves for misses.
        max_window_bytes: Most bytes prefetched in one draft window, `None` for no cap.
        num_hot_slots: Slots of HOT, `None` for one pool without regions.
        num_stage_slots: Slots of STAGE, `None` for what HOT and the misses leave.
        mode: Whether STAGE entries stay until their slot is wanted.
        is_rebalancing: Whether HOT follows the demand.
        max_predicted: Most predicted records under way at a time.
        is_lookahead_immediate: Whether what a draft's router chooses is fetched at once, and
            not in batches. Where the host sees each choice anyway, that costs nothing and
            gains the time until the boundary; Specter's batches spare a GPU the round trips.
        max_drafted_loading: Most slots that wait for their record while a draft goes on
            asking, `None` for no bound. Each of them is an expert less for a draft that
            computes with what the slots hold.
        host: What the processor may compute of the misses, `None` for nothing.
    """

    num_layers: int
    num_experts: int
    top_k: int
    num_slots: int
    eviction: Eviction
    record_bytes: int
    num_links: int = 1
    num_reserved_slots: int = 0
    max_window_bytes: int | None = None
    num_hot_slots: int | None = None
    num_stage_slots: int | None = None
    mode: CacheMode = CacheMode.LARGE
    is_rebalancing: bool = True
    max_predicted: int = 2
    is_lookahead_immediate: bool = False
    max_drafted_loading: int | None = None
    host: HostSetup | None = None

    @property
    def has_regions(self) -> bool:
        """Whether slots are labelled HOT and STAGE."""
        return self.num_hot_slots is not None

    @property
    def num_giveable_slots(self) -> int:
        """Slots that may be filled and still leave those kept for misses."""
        return self.num_slots - self.num_reserved_slots

    @property
    def num_all_experts(self) -> int:
        """Routed experts of all layers."""
        return self.num_layers * self.num_experts
