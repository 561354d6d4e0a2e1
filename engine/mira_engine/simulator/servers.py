"""What takes time: the link that moves records, and the processor.

The link is a server with a queue that works on its own while the clock is moved by the
processor's steps. It answers the same questions as `mira_engine.runtime.transfer`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass

from ..errors import ConfigError
from ..types import ExpertId


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCosts:
    """A machine and a model as rates, measured or derived. Times in seconds.

    A target pass of T tokens takes `pass_s + (T - 1) * pass_token_s`; each of its layers
    takes `layer_s + (T - 1) * layer_token_s` before its experts, and each expert
    `expert_s + (n - 1) * expert_token_s` for n tokens. A host beside it computes missing
    experts at the same time, each in `host_expert_s + (n - 1) * host_token_s`.

    Attributes:
        link_bytes_per_s: Rate of the link.
        link_latency_s: From the end of a record's transfer until it is ready.
        num_readers: Records that can be under way at once; they share the rate.
        pass_s: Fixed part of a target pass: embedding, head, sampling.
        pass_token_s: The same for each further token.
        layer_s: Attention, router, norms and shared experts of one layer, one token.
        layer_token_s: The same for each further token.
        expert_s: One resident expert, one token.
        expert_token_s: The same for each further token.
        draft_s: One draft token, whole.
        host_expert_s: One expert, one token, on the host beside a card; `None` where nothing
            is computed there.
        host_token_s: The same for each further token.
    """

    link_bytes_per_s: float
    link_latency_s: float = 0.0
    num_readers: int = 1
    pass_s: float = 0.0
    pass_token_s: float = 0.0
    layer_s: float = 0.0
    layer_token_s: float = 0.0
    expert_s: float = 0.0
    expert_token_s: float = 0.0
    draft_s: float = 0.0
    host_expert_s: float | None = None
    host_token_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.link_bytes_per_s > 0:
            raise ConfigError.for_field("link rate", self.link_bytes_per_s, "Give more than 0.")
        if self.num_readers < 1:
            raise ConfigError.for_field("readers", self.num_readers, "Give at least 1.")
        if self.host_expert_s is not None and not self.host_expert_s > 0:
            raise ConfigError.for_field("host time", self.host_expert_s, "Give more than 0.")

    def layer_seconds(self, num_tokens: int) -> float:
        """Seconds of a layer before its experts."""
        return self.layer_s + (num_tokens - 1) * self.layer_token_s

    def pass_seconds(self, num_tokens: int) -> float:
        """Seconds of a target pass outside of its layers."""
        return self.pass_s + (num_tokens - 1) * self.pass_token_s

    def expert_seconds(self, num_tokens: int) -> float:
        """Seconds of one resident expert."""
        return self.expert_s + (num_tokens - 1) * self.expert_token_s


@dataclass(frozen=True, slots=True)
class Landing:
    """The end of a record's move."""

    at_s: float
    expert: ExpertId
    slot: int


class LinkServer:
    """Moves records one after another, demand before prefetch; what has begun is not stopped.

    A reader takes the next request as soon as it is free, waits its turn on the link,
    holds it for `record_bytes / bytes_per_s`, and is free again when the record is ready,
    `latency_s` later. So a demand waits for what the readers have begun, and for nothing
    else that is prefetch.

    Calls must not go back in time.
    """

    def __init__(
        self, *, bytes_per_s: float, latency_s: float, num_readers: int, record_bytes: int
    ) -> None:
        self.record_bytes = record_bytes
        self._seconds = record_bytes / bytes_per_s
        self._latency_s = latency_s
        self._readers = [0.0] * num_readers
        self._free_at = 0.0
        self._demand: OrderedDict[ExpertId, tuple[int, float]] = OrderedDict()
        self._ahead: OrderedDict[ExpertId, tuple[int, float]] = OrderedDict()
        self._moving: list[tuple[float, int, Landing]] = []
        self._num_begun = 0
        self.busy_s = 0.0
        self._told = (0, 0.0)

    def take_usage(self) -> tuple[int, float]:
        """Returns bytes begun since the last call, and their seconds, as readers count them.

        Readers that wait for each other on the link each count their own time.
        """
        num_begun, busy_s = self._told
        self._told = self._num_begun, self.busy_s
        num_bytes = (self._num_begun - num_begun) * self.record_bytes
        return num_bytes, (self.busy_s - busy_s) * len(self._readers)

    def submit(self, expert: ExpertId, slot: int, *, is_demand: bool, now_s: float) -> None:
        """Queues a record."""
        self._begin_until(now_s)
        (self._demand if is_demand else self._ahead)[expert] = (slot, now_s)
        self._begin_until(now_s)

    def promote(self, expert: ExpertId, now_s: float) -> None:
        """Makes a queued prefetch a demand; does nothing once it has begun."""
        self._begin_until(now_s)
        request = self._ahead.pop(expert, None)
        if request is not None:
            self._demand[expert] = request

    def poll(self, now_s: float) -> list[Landing]:
        """Returns what has landed by now and was not returned before, in that order."""
        self._begin_until(now_s)
        landed = []
        while self._moving and self._moving[0][0] <= now_s:
            landed.append(heapq.heappop(self._moving)[2])
        return landed

    @property
    def next_landing_s(self) -> float:
        """When the next record lands; infinite where none is under way."""
        return self._moving[0][0] if self._moving else math.inf

    def _begin_until(self, now_s: float) -> None:
        """Lets the readers take what they would have taken by now."""
        while self._demand or self._ahead:
            free_at = self._readers[0]
            if free_at > now_s:
                return
            queue = self._demand or self._ahead
            expert, (slot, submitted_s) = queue.popitem(last=False)
            start = max(free_at, submitted_s, self._free_at)
            self._free_at = start + self._seconds
            ready_at = self._free_at + self._latency_s
            heapq.heapreplace(self._readers, ready_at)
            self._num_begun += 1
            heapq.heappush(
                self._moving, (ready_at, self._num_begun, Landing(ready_at, expert, slot))
            )
            self.busy_s += self._seconds
