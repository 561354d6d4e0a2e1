"""A flood: passes that ask for more experts than there are slots, and what they bring.

Passes go through all layers in order. Where one needs more experts than there are slots,
what was used longest ago comes next, and giving up that would leave nothing of a pass for
the one after it. So what takes another's slot passes through: it goes as soon as its layer is
behind, and what was there before stays, as does what takes a slot that nobody had. A prompt's
passes, but the last, are known to be such; of a reply's, each says what to do in the next.

HOT and STAGE see to that themselves: with regions nothing passes through. Pure; knows slots
by what the residency table says of them.
"""

from __future__ import annotations

from collections import deque

from ..types import ExpertId
from .base import Evict, EvictReason
from .residency import ResidencyTable


class Flood:
    """Tells whether passes are flooded, and frees the slots of what passed through.

    Args:
        num_giveable: Slots that a pass may fill and still leave those that are reserved.
        has_regions: Whether HOT and STAGE decide what stays.

    Attributes:
        is_flooded: Whether the pass before asked for more experts than there are slots.
        is_more_to_read: Whether another pass of the prompt follows this one.
        is_passing_through: Whether replies' passes bring more than stays: then what is fetched
            ahead would make something give way that the same pass needs.
        is_streaming: Whether what takes another's slot passes through, and what is there stays.
    """

    def __init__(self, num_giveable: int, *, has_regions: bool) -> None:
        self._num_giveable = num_giveable
        self._has_regions = has_regions
        self._is_prompt = False
        self._layer = 0
        self._num_asked = 0
        """Experts that the layers of this pass asked for so far."""
        self._brought: deque[tuple[ExpertId, int]] = deque()
        """What passed through, in order, each with the generation of its slot."""
        self.is_flooded = False
        self.is_more_to_read = False
        self.is_passing_through = False
        self.is_streaming = False

    def begin_prompt(self, num_passes: int) -> None:
        """A prompt's pass begins, with so many still to come, itself included."""
        self._is_prompt = True
        self.is_more_to_read = num_passes > 1
        self._num_asked = 0
        self._settle()

    def end_prompt(self) -> None:
        """The prompt is read."""
        self._is_prompt = self.is_more_to_read = False
        self._brought.clear()
        self._num_asked = 0
        self._settle()

    def end_reply(self) -> None:
        """The reply has ended in any way: its passes say nothing of those of another."""
        self.is_flooded = False
        self.end_prompt()

    def enter_layer(self, layer: int, num_experts: int) -> None:
        """A layer asks for so many experts. One that is not behind the last begins a pass."""
        if layer <= self._layer:
            self._begin_pass()
        self._layer = layer
        self._num_asked += num_experts

    def _begin_pass(self) -> None:
        """Judges the pass before: a prompt's says nothing of those that follow it."""
        is_flooded = not self._is_prompt and self._num_asked > self._num_giveable
        self._num_asked = 0
        if is_flooded is self.is_flooded:
            return
        self.is_flooded = is_flooded
        if not is_flooded:
            self._brought.clear()
        self._settle()

    def _settle(self) -> None:
        """Brings what follows from the state in line with it: it is asked for more often."""
        self.is_passing_through = self.is_flooded and not self._has_regions
        is_known = self.is_flooded or self.is_more_to_read
        self.is_streaming = is_known and not self._has_regions

    def bring(self, expert: ExpertId, generation: int) -> None:
        """An expert passes through, in a slot that was given away so many times."""
        self._brought.append((expert, generation))

    def make_room(self, residency: ResidencyTable) -> list[Evict]:
        """Frees a slot of what passed through for a layer that is behind, if none is free.

        What was brought for a layer just done is needed last.
        """
        brought = self._brought
        if residency.num_used < residency.num_slots:
            return []
        while brought and brought[0][0].layer != self._layer:
            expert, generation = brought.popleft()
            slot = residency.slot_of(expert)
            if slot is None or residency.generation(slot) != generation:
                continue  # It gave way since, and somebody else may have brought it again.
            if residency.is_ready(expert) and not residency.is_pinned(slot):
                residency.evict(expert)
                return [Evict(expert, slot, EvictReason.LAYER_BEHIND)]
        return []
