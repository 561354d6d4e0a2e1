"""The layer that a pass computes: who is missing, who is waited for, and who must stay.

Pure. It is open while one of its experts is not there. Until then all that are there are
pinned, so that none gives way to another; a layer that is whole from the start needs none of
that. Its misses get slots most tokens first, as loads and computations free them.

Source: Specter, Verification Expert Cache Residency Manager (hits first, protection until an
expert's tokens are done).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..types import ExpertId, ServedBy
from .base import Action, Await, Compute, ComputeOnHost, Fetch, FetchReason
from .flood import Flood
from .residency import ResidencyTable
from .slot_table import SlotState


class OpenLayer:
    """One layer after another of the passes through a model.

    Args:
        residency: Gives slots and holds pins.
        flood: Says whether what is brought passes through, and makes room for it.

    Attributes:
        number: The MoE layer.
        tokens_of: Its experts, and how many tokens chose each.
        missing: Experts that have no slot yet, in the order in which they get one.
        waiting: Those on their way, each with its computation.
        pinned: Experts whose slots are kept for this layer.
    """

    def __init__(self, residency: ResidencyTable, flood: Flood) -> None:
        self._residency = residency
        self._flood = flood
        self._num_fetched = 0
        self.number = 0
        self.tokens_of: Mapping[ExpertId, int] = {}
        self.missing: list[ExpertId] = []
        self.waiting: dict[ExpertId, Compute] = {}
        self.pinned: set[ExpertId] = set()

    @property
    def is_miss_awaited(self) -> bool:
        """Whether it waits for an expert that was not even on its way to it."""
        return bool(self.missing) or any(
            awaited.served_by is ServedBy.MISS for awaited in self.waiting.values()
        )

    def enter(
        self, number: int, tokens_of: Mapping[ExpertId, int], on_host: Collection[ExpertId]
    ) -> list[Action]:
        """A layer begins. Unless all of its experts are there, those with a slot are pinned.

        Args:
            number: The MoE layer.
            tokens_of: Its experts, and how many tokens chose each.
            on_host: Whom of them the processor computes where they have no slot.

        Returns:
            `Compute` for experts that are there, `Await` for those on their way,
            `ComputeOnHost`. The others are `missing`, most tokens first.
        """
        residency = self._residency
        self.number, self.tokens_of = number, tokens_of
        self._flood.enter_layer(number, len(tokens_of))
        is_whole = all(residency.is_ready(e) for e in tokens_of if e not in on_host)
        actions: list[Action] = []
        for expert, num_tokens in tokens_of.items():
            slot = residency.slot_of(expert)
            if slot is None:
                if expert in on_host:
                    actions.append(ComputeOnHost(expert, num_tokens))
                else:
                    self.missing.append(expert)
                continue
            if not is_whole:
                self._pin(expert)
            served_by = residency.served_by(expert)
            found = Compute(expert, slot, num_tokens, served_by, residency.use(expert))
            if is_whole or residency.state(slot) is SlotState.READY:
                actions.append(found)
            else:
                self.waiting[expert] = found
                actions.append(Await(expert, slot))
        if self.missing:
            self.missing.sort(key=lambda e: (-tokens_of[e], e.expert))
        return actions

    def _pin(self, expert: ExpertId) -> None:
        self._residency.pin(expert)
        self.pinned.add(expert)

    def fetch_missing(self, expected: Collection[ExpertId]) -> list[Action]:
        """Gives missing experts slots while there are any to give.

        Args:
            expected: Experts that go only where nobody else can: they are likely to be used.

        Returns:
            Fetches, and what made room for them.
        """
        actions: list[Action] = []
        residency, flood, missing = self._residency, self._flood, self.missing
        is_streaming = flood.is_streaming
        while missing:
            is_full = residency.num_used == residency.num_slots
            if is_streaming:
                actions += flood.make_room(residency)
            fetch = None
            if expected:
                fetch = residency.admit(missing[0], FetchReason.MISS, protected=expected)
            fetch = fetch or residency.admit(missing[0], FetchReason.MISS)
            if fetch is None:
                break
            missing.pop(0)
            self._begin_fetch(fetch)
            if is_streaming and is_full:  # What takes a slot that nobody had stays.
                flood.bring(fetch.expert, residency.generation(fetch.slot))
            actions.append(fetch)
        return actions

    def _begin_fetch(self, fetch: Fetch) -> None:
        expert = fetch.expert
        self._num_fetched += 1
        self._pin(expert)
        num_tokens = self.tokens_of[expert]
        self.waiting[expert] = Compute(expert, fetch.slot, num_tokens, ServedBy.MISS, False)

    def unpin(self, slots: Sequence[int]) -> None:
        """The tokens of the experts in these slots are done."""
        for slot in slots:
            expert = self._residency.expert_in(slot)
            assert expert is not None
            self._residency.unpin(expert)
            self.pinned.discard(expert)

    def leave(self) -> None:
        """It is done, or was broken off: nothing of it is waited for or pinned."""
        for expert in sorted(self.pinned):
            self._residency.unpin(expert)
        self.pinned.clear()
        self.waiting.clear()
        self.missing.clear()

    def take_num_fetched(self) -> int:
        """Returns the records fetched on demand since this was asked last."""
        number, self._num_fetched = self._num_fetched, 0
        return number
