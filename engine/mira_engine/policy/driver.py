"""The driver: all policies of the expert cache as one object, observations in, actions out.

`mira_engine.runtime.executor` tells it what the routers chose and what has landed, and
carries out what it answers; the simulator does the same on a virtual clock. It has no
clock, thread or file: the same observations give the same actions, which
`mira_engine.policy.replay` writes down and holds against a fresh driver. So observations
are methods whose arguments are numbers and sequences of numbers only.

One pass over a layer: `enter_layer` answers with what can be computed, what is on its way
and what to fetch; `landed` and `computed` go on from there until nothing is waited for.

Source: Specter, Verification Expert Cache Residency Manager; DESIGN, "Policies".
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..types import CacheMode, Eviction, ExpertId, ServedBy
from .base import (
    Action,
    Await,
    Compute,
    ComputeOnHost,
    Decline,
    DeclineReason,
    DraftOn,
    Evict,
    EvictReason,
    Fetch,
    FetchReason,
    Skip,
    SkipReason,
)
from .eviction import EVICTION_POLICIES, EvictionPolicy
from .host_misses import HostMisses, HostSetup
from .lookahead import ExpertLookaheadBuffer, IncrementalRoutingPatternAnalyzer
from .payoff import PrefetchPayoff, PrefetchRound
from .prediction import FarPick, PredictiveStaging
from .prefetch import LayerAwarePrefetchPlanner
from .rebalance import Rebalancer
from .residency import ResidencyTable, SlotState

OnDecision = Callable[[str, Sequence[Any], Sequence[Action]], None]
"""Told the name of an observation, its arguments, and the actions it was answered with."""

_NOBODY: frozenset[ExpertId] = frozenset()

_Observation = TypeVar("_Observation", bound=Callable[..., list[Action]])


def _observation(method: _Observation) -> _Observation:
    """Tells `on_decision` of every call, with the answer."""

    @functools.wraps(method)
    def observe(self: ExpertCacheDriver, *arguments: Any) -> list[Action]:
        actions = method(self, *arguments)
        if self.on_decision is not None:
            self.on_decision(method.__name__, arguments, actions)
        return actions

    return observe  # type: ignore[return-value]


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


class ExpertCacheDriver:
    """Decides which experts are computed, fetched, kept and given up.

    Args:
        setup: What it decides for.
        eviction: Orders victims in place of the setup's policy, for simulated baselines.

    Attributes:
        residency: Slots and their experts; changed by nobody else.
        lookahead: What the draft's routers chose in this window.
        planner: Plans a draft window's batches.
        rebalancer: Chooses the HOT experts.
        payoff: Whether what drafts announce is worth moving ahead.
        prediction_payoff: Whether what heads predict is.
        on_decision: Told everything, `None` for nobody.
    """

    def __init__(self, setup: CacheSetup, eviction: EvictionPolicy | None = None) -> None:
        self._setup = setup
        self.residency = ResidencyTable(
            setup.num_slots,
            eviction or EVICTION_POLICIES[setup.eviction](),
            num_hot_slots=setup.num_hot_slots,
            num_stage_slots=setup.num_stage_slots,
            mode=setup.mode,
        )
        self.lookahead = ExpertLookaheadBuffer(setup.num_layers, setup.num_experts)
        self.planner = LayerAwarePrefetchPlanner(
            setup.record_bytes,
            num_reserved_slots=setup.num_reserved_slots,
            max_window_bytes=setup.max_window_bytes,
        )
        self.rebalancer = Rebalancer()
        self.payoff = PrefetchPayoff()
        self.prediction_payoff = PrefetchPayoff()
        self.on_decision: OnDecision | None = None
        self._analyzer = IncrementalRoutingPatternAnalyzer(self.lookahead)
        self._staging = PredictiveStaging(setup.top_k)
        self._num_giveable = setup.num_slots - setup.num_reserved_slots
        self._max_loading = self._num_giveable
        if setup.max_drafted_loading is not None:
            self._max_loading = min(self._max_loading, setup.max_drafted_loading)
        self._num_missed = 0
        """Records fetched on demand since the last pass ended."""
        self._host: HostMisses | None = None
        if setup.host is not None:
            self._host = HostMisses(
                setup.host,
                num_experts=setup.num_experts,
                top_k=setup.top_k,
                num_reserved_slots=setup.num_reserved_slots,
            )
        self._has_regions = setup.num_hot_slots is not None
        self._is_prediction_wanted = True
        self._ahead: dict[ExpertId, FetchReason] = {}
        """What was moved ahead and not used yet."""
        self._moved = {FetchReason.LOOKAHEAD: 0, FetchReason.PREDICTED: 0}
        self._used = dict(self._moved)
        self._last_counts: dict[ExpertId, int] = {}
        """Routed tokens of the prompt's last pass."""
        self._is_more_to_read = False
        self._streamed: deque[tuple[ExpertId, int]] = deque()
        """What passes that need more than there are slots brought, in order, each with the
        generation of its slot."""
        self._num_of_pass = 0
        """Experts that the layers of this pass asked for so far."""
        self._is_flooded = False
        """Whether the pass before asked for more experts than there are slots."""
        self._window: set[ExpertId] = set()
        """What the running draft's routers chose, where that is fetched at once."""
        self._is_lookahead_on = False
        self._layer = 0
        self._tokens_of: dict[ExpertId, int] = {}
        self._missing: list[ExpertId] = []
        self._waiting: dict[ExpertId, Compute] = {}
        self._pinned: set[ExpertId] = set()
        self._failed: list[int] = []

    @property
    def is_layer_open(self) -> bool:
        """Whether the layer that was entered still needs experts that are not there."""
        return bool(self._waiting or self._missing)

    @property
    def is_miss_awaited(self) -> bool:
        """Whether the open layer waits for an expert that was not even on its way to it."""
        return bool(self._missing) or any(
            awaited.served_by is ServedBy.MISS for awaited in self._waiting.values()
        )

    @property
    def has_layer_ends(self) -> bool:
        """Whether `leave_layer` does anything for a layer that was whole from the start."""
        return self._has_regions

    @property
    def is_prediction_wanted(self) -> bool:
        """Whether `predict` would move anything in this pass.

        Not in a prompt's passes before the last: what they predict is most of every layer, and
        would drive out what the next pass needs.
        """
        has_room = self.residency.num_used < self._num_all_experts
        is_passing_through = self._is_more_to_read or self._is_passing_through
        return self._is_prediction_wanted and has_room and not is_passing_through

    @property
    def _num_all_experts(self) -> int:
        return self._setup.num_layers * self._setup.num_experts

    # -- one layer of a target pass --------------------------------------------------------

    @_observation
    def enter_layer(self, layer: int, demand: Sequence[tuple[int, int]]) -> list[Action]:
        """The target's router has chosen.

        Args:
            layer: MoE layer.
            demand: Experts and how many tokens chose each, ascending by expert.

        Returns:
            `Compute` for experts that are there, `Await` for those on their way,
            `ComputeOnHost` for missing ones that need no slot, `Fetch` for the others while
            there are slots to give, most tokens first. Unless all others are there, all are
            pinned until they are computed.
        """
        residency = self.residency
        if layer <= self._layer:
            self._begin_target_pass()
        self._layer = layer
        self._num_of_pass += len(demand)
        self._tokens_of = {ExpertId(layer, expert): count for expert, count in demand}
        on_host = self._host.enter_layer(self._tokens_of, residency) if self._host else _NOBODY
        is_whole = all(residency.is_ready(e) for e in self._tokens_of if e not in on_host)
        actions: list[Action] = []
        for expert, num_tokens in self._tokens_of.items():
            slot = residency.slot_of(expert)
            served_by = residency.served_by(expert)
            if self._has_regions:
                self.rebalancer.observe_routing(expert, num_tokens, served_by)
            if slot is None and expert in on_host:
                actions.append(ComputeOnHost(expert, num_tokens))
                continue
            if slot is None:
                self._missing.append(expert)
                continue
            if not is_whole:
                self._pin(expert)
            if self._ahead:
                self._note_use(expert)
            found = Compute(expert, slot, num_tokens, served_by, residency.use(expert))
            if residency.state(slot) is SlotState.READY:
                actions.append(found)
            else:
                self._waiting[expert] = found
                actions.append(Await(expert, slot))
        if residency.is_prefilling:
            self._last_counts.update(self._tokens_of)
        self._missing.sort(key=lambda e: (-self._tokens_of[e], e.expert))
        actions += self._fetch_missing()
        if on_host and not self._missing:
            # What the layer computes is not pinned where nothing is waited for.
            protected = self._staging.expected.union(self._tokens_of)
            actions += self._host.bring_back(residency, protected)
        return actions + self._staging.enter_layer(layer) if self.is_staging else actions

    @_observation
    def predict(
        self, layer: int, picks: Sequence[tuple[int, float]], num_tokens: int
    ) -> list[Action]:
        """Heads expect these experts in a later layer. After `enter_layer` of the present one.

        Args:
            layer: The later layer.
            picks: Experts and their expected shares of the routed tokens, likeliest first.
            num_tokens: Tokens of the pass.

        Returns:
            Fetches to submit; skips and declines, each with its reason.
        """
        skips = self._staging.expect(layer, picks, num_tokens, self.residency)
        return [*skips, *self._stage()]

    @_observation
    def predict_far(self, picks: Sequence[FarPick]) -> list[Action]:
        """A far head expects these experts in all later layers. After `enter_layer`.

        Args:
            picks: Layer, expert and probability of a use, nearest layer first, likeliest first.

        Returns:
            Fetches to submit; skips and declines. What finds no room follows with `landed`.
        """
        skips = self._staging.expect_far(self._layer, picks, self.residency)
        return [*skips, *self._stage()]

    @property
    def is_staging(self) -> bool:
        """Whether predicted records wait for the link: then what landed is worth telling soon."""
        return self._staging.is_waiting

    def _stage(self) -> list[Action]:
        """Moves what is predicted, nearest layer first, while the link has room."""
        setup, residency, staging = self._setup, self.residency, self._staging
        # A prompt's pass needs most of a layer: the next one's share of the slots fills while
        # this one computes.
        limit = setup.num_experts if residency.is_prefilling else setup.max_predicted
        actions: list[Action] = []
        while staging.is_waiting:
            expert = staging.next_wanted(residency, limit)
            if expert is None:
                break
            protected = staging.expected.union(self._tokens_of)
            fetch = residency.admit(expert, FetchReason.PREDICTED, protected=protected)
            if fetch is not None:
                staging.begin(expert)
            actions.append(fetch or Decline(expert, DeclineReason.STAGE_FULL))
        self._note_moves(actions)
        return actions

    def _begin_target_pass(self) -> None:
        """Judges the pass before: a prompt's says nothing of those that follow it."""
        is_flooded = not self.residency.is_prefilling and self._num_of_pass > self._num_giveable
        if self._is_flooded and not is_flooded:
            self._streamed.clear()
        self._is_flooded = is_flooded
        self._num_of_pass = 0

    @property
    def _is_streaming(self) -> bool:
        """Whether what is brought passes through, and what is there stays.

        Passes go through all layers in order. Where one needs more experts than there are
        slots, what was used longest ago comes next, and giving up that would leave nothing
        of a pass for the one after it.
        """
        is_prompt = self.residency.is_prefilling and self._is_more_to_read
        return self._is_passing_through or (is_prompt and not self._has_regions)

    @property
    def _is_passing_through(self) -> bool:
        """Whether replies' passes bring more than stays: then what is fetched ahead would make
        something give way that the same pass needs. HOT and STAGE see to that themselves.
        """
        return self._is_flooded and not self._has_regions

    def _make_room_behind(self) -> list[Action]:
        """Frees a slot of what passed through for a layer that is behind, if none is free.

        What was brought for a layer just done is needed last.
        """
        residency, streamed = self.residency, self._streamed
        if residency.num_used < residency.num_slots:
            return []
        while streamed and streamed[0][0].layer != self._layer:
            expert, generation = streamed.popleft()
            slot = residency.slot_of(expert)
            if slot is None or residency.generation(slot) != generation:
                continue  # It gave way since, and somebody else may have brought it again.
            if residency.is_ready(expert) and not residency.is_pinned(slot):
                residency.evict(expert)
                return [Evict(expert, slot, EvictReason.LAYER_BEHIND)]
        return []

    def _note_moves(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Fetch) and not self.residency.is_prefilling:
                self._ahead[action.expert] = action.reason
                self._moved[action.reason] += 1

    def _note_use(self, expert: ExpertId) -> None:
        reason = self._ahead.pop(expert, None)
        if reason is not None:
            self._used[reason] += 1

    @_observation
    def landed(self, slot: int) -> list[Action]:
        """A load has ended well.

        Returns:
            The expert's computation where it is waited for; fetches that had to wait for a
            slot that may be given up.
        """
        self.residency.complete(slot)
        expert = self.residency.expert_in(slot)
        awaited = self._waiting.pop(expert, None) if expert is not None else None
        missing = self._fetch_missing()
        staged = self._stage() if self._staging.is_waiting and not self._missing else []
        return [*([awaited] if awaited is not None else []), *missing, *staged]

    @_observation
    def failed(self, slot: int) -> list[Action]:
        """A load has failed. Where nobody waits for it, it only loses its slot.

        Returns:
            Fetches that the slot is free for now.
        """
        if self.residency.is_pinned(slot):
            self._failed.append(slot)
            return []
        self.residency.abandon(slot)
        return self._fetch_missing()

    @_observation
    def computed(self, slots: Sequence[int]) -> list[Action]:
        """The tokens of the experts in these slots are done: the slots may go to missing ones."""
        for slot in slots:
            expert = self.residency.expert_in(slot)
            assert expert is not None
            self.residency.unpin(expert)
            self._pinned.discard(expert)
        return self._fetch_missing()

    @_observation
    def leave_layer(self) -> list[Action]:
        """The layer is done, or was broken off: nothing of it is waited for or pinned."""
        self._drop_layer()
        return self.residency.leave_layer(self._layer) if self._has_regions else []

    def _drop_layer(self) -> None:
        for expert in sorted(self._pinned):
            self.residency.unpin(expert)
        self._pinned.clear()
        self._waiting.clear()
        self._missing.clear()

    def _fetch_missing(self) -> list[Action]:
        fetches: list[Action] = []
        is_streaming = self._is_streaming
        while self._missing:
            if is_streaming:
                fetches += self._make_room_behind()
            fetch = self._admit_missing(self._missing[0])
            if fetch is None:
                break
            self._missing.pop(0)
            self._num_missed += 1
            self._pin(fetch.expert)
            if is_streaming:
                generation = self.residency.generation(fetch.slot)
                self._streamed.append((fetch.expert, generation))
            num_tokens = self._tokens_of[fetch.expert]
            self._waiting[fetch.expert] = Compute(
                fetch.expert, fetch.slot, num_tokens, ServedBy.MISS, False
            )
            fetches.append(fetch)
        return fetches

    def _admit_missing(self, expert: ExpertId) -> Fetch | None:
        """Gives a missing expert a slot, if it can be of one that nobody expects to use soon."""
        fetch = None
        if self._staging.expected:
            fetch = self.residency.admit(expert, FetchReason.MISS, protected=self._staging.expected)
        return fetch or self.residency.admit(expert, FetchReason.MISS)

    def _pin(self, expert: ExpertId) -> None:
        self.residency.pin(expert)
        self._pinned.add(expert)

    # -- drafting --------------------------------------------------------------------------

    @_observation
    def begin_draft(self, num_tokens: int, is_prefetching: bool) -> list[Action]:
        """A draft window begins: the counters are cleared.

        Args:
            num_tokens: K.
            is_prefetching: Whether anything may be moved ahead.

        Returns:
            `DraftOn` up to the first boundary, if there is one.
        """
        self._analyzer.clear()
        self._window.clear()
        self._is_lookahead_on = False
        if not is_prefetching or self._is_passing_through or not self.payoff.begin_round():
            return []
        if self._setup.is_lookahead_immediate:
            self._is_lookahead_on = True
            return []
        return [DraftOn(self.planner.begin(num_tokens))]

    @property
    def is_listening(self) -> bool:
        """Whether `draft_routed` is to be told of each choice of the running draft."""
        return self._is_lookahead_on

    @_observation
    def draft_routed(self, layer: int, experts: Sequence[int]) -> list[Action]:
        """A draft's router has chosen. Returns fetches of what is missing."""
        chosen = [ExpertId(layer, expert) for expert in experts]
        self._window.update(chosen)
        actions: list[Action] = []
        for expert in chosen:
            if self.residency.slot_of(expert) is None:
                fetch = None
                # A miss must find a slot whose record it need not wait for.
                if self.residency.num_loading < self._max_loading:
                    fetch = self.residency.admit(
                        expert, FetchReason.LOOKAHEAD, protected=self._window
                    )
                actions.append(fetch or Skip(expert, SkipReason.NO_ROOM))
        self._note_moves(actions)
        return actions

    @_observation
    def reach_boundary(
        self, num_drafted: int, counts: Sequence[Sequence[tuple[int, int]]]
    ) -> list[Action]:
        """A draft boundary.

        Args:
            num_drafted: Tokens of this window so far.
            counts: By layer, the experts that they chose, and how often: what `lookahead`
                holds. Given too, since kernels add to its memory.

        Returns:
            The batch to submit, and `DraftOn` up to the next boundary, if there is one.
        """
        self.lookahead.restore(counts)
        batch = self.planner.plan(
            self._analyzer.snapshot(), self.residency, num_drafted=num_drafted
        )
        actions = list(batch.actions)
        self._note_moves(actions)
        if batch.next_chunk:
            actions.append(DraftOn(batch.next_chunk))
        return actions

    @_observation
    def end_draft(self, num_drafted: int, draft_s: float) -> list[Action]:
        """The draft is over, after `draft_s` seconds, planning left out."""
        self._analyzer.clear()
        self._is_lookahead_on = False
        self.planner.observe_draft(num_drafted, draft_s)
        return []

    # -- passes and replies ----------------------------------------------------------------

    @_observation
    def begin_prefill(self, num_passes: int) -> list[Action]:
        """A prompt's pass begins, with so many still to come, itself included.

        HOT keeps its experts from now on. Without regions, and as long as there is another
        pass, so does everything that is there, and what is brought passes through.
        """
        self.residency.begin_prefill()
        self._is_more_to_read = num_passes > 1
        self._last_counts.clear()
        self._num_of_pass = 0
        return []

    @_observation
    def end_prefill(self) -> list[Action]:
        """The prompt is read. Returns the swaps that warm HOT by what its end was routed to."""
        self.residency.end_prefill()
        self._is_more_to_read = False
        self._streamed.clear()
        self._num_of_pass = 0
        if not self._is_rebalanced:
            return []
        return self.rebalancer.warm(self.residency, self._last_counts)

    @_observation
    def end_pass(
        self,
        num_tokens: int,
        link_bytes: int = 0,
        link_s: float = 0.0,
        planning_s: float = 0.0,
        predicting_s: float = 0.0,
        round_s: float = 0.0,
        host_s: float = 0.0,
    ) -> list[Action]:
        """A target pass is over; what was moved ahead for it and not used has no claim.

        Args:
            num_tokens: Tokens that it went on by.
            link_bytes: Bytes that landed since the pass before.
            link_s: Seconds that moving them took, each record's counted for itself.
            planning_s: Seconds that planning a draft's batches took.
            predicting_s: Seconds that heads took.
            round_s: Seconds since the pass before ended, 0 where that is not known.
            host_s: Seconds in which the processor computed misses.

        Returns:
            Skips of what was expected and found no room; the rebalancer's swaps, where its
            interval is over.
        """
        self.planner.observe_transfer(link_bytes, link_s / self._setup.num_links)
        self._judge(self.payoff, FetchReason.LOOKAHEAD, planning_s, round_s)
        self._judge(self.prediction_payoff, FetchReason.PREDICTED, predicting_s, round_s)
        self._num_missed = 0
        if self._host is not None:
            self._host.end_pass(host_s)
        self._ahead.clear()
        actions: list[Action] = list(self._staging.begin_pass())
        self._is_prediction_wanted = self.prediction_payoff.begin_round()
        self.residency.end_window()
        if self._is_rebalanced:
            self.rebalancer.observe_tokens(num_tokens)
            if self.rebalancer.is_due():
                actions += self.rebalancer.decide(self.residency)
        return actions

    @_observation
    def fill_hot(self, experts: Sequence[tuple[int, int]]) -> list[Action]:
        """Fetches experts, given as layer and number, into HOT while it has room."""
        actions: list[Action] = []
        for layer, expert in experts:
            wanted = ExpertId(layer, expert)
            if self.residency.slot_of(wanted) is None:
                fetch = self.residency.admit(wanted, FetchReason.REBALANCE)
                actions.append(fetch or Skip(wanted, SkipReason.NO_ROOM))
        return actions

    @_observation
    def allow_host(self, is_allowed: bool) -> list[Action]:
        """Says whether the processor may compute misses in the reply that begins."""
        if self._host is not None:
            self._host.is_allowed = is_allowed
        return []

    @_observation
    def end_reply(self) -> list[Action]:
        """The reply has ended in any way: failed loads give their slots up."""
        self._drop_layer()
        for slot in self._failed:
            self.residency.abandon(slot)
        self._failed.clear()
        self._streamed.clear()
        self._num_of_pass, self._is_flooded = 0, False
        if self._host is not None:
            self._host.end_reply()
        self._is_lookahead_on = False
        self._ahead.clear()
        self._staging.begin_pass()
        self.residency.end_window()
        self.residency.end_prefill()
        self._is_more_to_read = False
        return []

    @property
    def _is_rebalanced(self) -> bool:
        return self._has_regions and self._setup.is_rebalancing

    def _judge(
        self, payoff: PrefetchPayoff, reason: FetchReason, ahead_s: float, round_s: float
    ) -> None:
        """Tells what records moved ahead for the pass were good for.

        A record that nobody used costs the time of the misses that came while it moved. Where
        the length of the round is not known, that is taken to be all of its time.
        """
        num_moved, num_used = self._moved[reason], self._used[reason]
        self._moved[reason] = self._used[reason] = 0
        record_s = self.planner.record_s
        if not num_moved or record_s is None:
            return
        busy = min(1.0, self._num_missed * record_s / round_s) if round_s else 1.0
        payoff.observe(
            PrefetchRound(
                num_prefetched=num_moved,
                num_used=num_used,
                # Whoever misses one record waits for all of its time, links beside it or not.
                saved_s=num_used * record_s * self._setup.num_links,
                spent_s=(num_moved - num_used) * record_s * busy + ahead_s,
            )
        )
