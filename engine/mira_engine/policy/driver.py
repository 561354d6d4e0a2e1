"""The driver: all policies of the expert cache as one object, observations in, actions out.

`mira_engine.runtime.executor` tells it what the routers chose and what has landed, and
carries out what it answers; the simulator does the same on a virtual clock. It has no
clock, thread or file: the same observations give the same actions, which
`mira_engine.policy.replay` writes down and holds against a fresh driver. So observations
are methods whose arguments are numbers and sequences of numbers only.

It holds the parts and asks them: `open_layer` for the layer that is computed, `flood` where
passes need more than the slots, `draft_lookahead` and `prediction` for what is fetched ahead,
`moved_ahead` for whether that pays, `residency` for the slots.

One pass over a layer: `enter_layer` answers with what can be computed, what is on its way
and what to fetch; `landed` and `computed` go on from there until nothing is waited for.

Source: Specter, Verification Expert Cache Residency Manager; DESIGN, "Policies".
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import ExpertId
from .base import Action, FetchReason
from .cache_setup import CacheSetup
from .draft_lookahead import DraftLookahead
from .eviction import EVICTION_POLICIES, EvictionPolicy
from .flood import Flood
from .host_misses import HostMisses
from .moved_ahead import MovedAhead
from .observation import OnDecision, observation
from .open_layer import OpenLayer
from .payoff import PrefetchPayoff
from .prediction import FarPick, PredictiveStaging
from .rebalance import Rebalancer
from .residency import ResidencyTable

_NOBODY: frozenset[ExpertId] = frozenset()


class ExpertCacheDriver:
    """Decides which experts are computed, fetched, kept and given up.

    Args:
        setup: What it decides for.
        eviction: Orders victims in place of the setup's policy, for simulated baselines.

    Attributes:
        residency: Slots and their experts; changed by nobody else.
        open_layer: The layer that is computed.
        flood: Whether passes need more than the slots.
        lookahead: What the draft's routers chose in this window.
        planner: Plans a draft window's batches.
        rebalancer: Chooses the HOT experts.
        has_layer_ends: Whether `leave_layer` does anything for a layer that was whole from
            the start.
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
        self.flood = Flood(setup.num_giveable_slots, has_regions=setup.has_regions)
        self.open_layer = OpenLayer(self.residency, self.flood)
        self._draft = DraftLookahead(setup, self.residency)
        self.lookahead = self._draft.buffer
        self.planner = self._draft.planner
        self.rebalancer = Rebalancer()
        self._moved = MovedAhead(setup.num_links)
        self.on_decision: OnDecision | None = None
        self._staging = PredictiveStaging(setup.top_k)
        self._is_prediction_wanted = True
        self._host: HostMisses | None = None
        if setup.host is not None:
            self._host = HostMisses(
                setup.host,
                num_experts=setup.num_experts,
                top_k=setup.top_k,
                num_reserved_slots=setup.num_reserved_slots,
            )
        self.has_layer_ends = self._has_regions = setup.has_regions
        self._is_rebalanced = setup.has_regions and setup.is_rebalancing
        self._num_all_experts = setup.num_all_experts
        self._last_counts: dict[ExpertId, int] = {}
        """Routed tokens of the prompt's last pass."""
        self._failed: list[int] = []
        """Slots whose loads failed while somebody waited for them."""

    @property
    def payoff(self) -> PrefetchPayoff:
        """Whether what drafts announce is worth moving ahead."""
        return self._moved.payoffs[FetchReason.LOOKAHEAD]

    @property
    def prediction_payoff(self) -> PrefetchPayoff:
        """Whether what heads predict is."""
        return self._moved.payoffs[FetchReason.PREDICTED]

    @property
    def is_layer_open(self) -> bool:
        """Whether the layer that was entered still needs experts that are not there."""
        layer = self.open_layer
        return bool(layer.waiting or layer.missing)

    @property
    def is_miss_awaited(self) -> bool:
        """Whether the open layer waits for an expert that was not even on its way to it."""
        return self.open_layer.is_miss_awaited

    @property
    def is_prediction_wanted(self) -> bool:
        """Whether `predict` would move anything in this pass.

        Not in a prompt's passes before the last: what they predict is most of every layer, and
        would drive out what the next pass needs.
        """
        flood = self.flood
        is_passing_through = flood.is_more_to_read or flood.is_passing_through
        has_room = self.residency.num_used < self._num_all_experts
        return self._is_prediction_wanted and has_room and not is_passing_through

    @property
    def is_staging(self) -> bool:
        """Whether predicted records wait for the link: then what landed is worth telling soon."""
        return self._staging.is_waiting

    @property
    def is_listening(self) -> bool:
        """Whether `draft_routed` is to be told of each choice of the running draft."""
        return self._draft.is_listening

    # -- one layer of a target pass --------------------------------------------------------

    @observation
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
        residency, open_layer = self.residency, self.open_layer
        tokens_of = {ExpertId(layer, expert): count for expert, count in demand}
        on_host = self._host.enter_layer(tokens_of, residency) if self._host else _NOBODY
        if self._has_regions:
            for expert, num_tokens in tokens_of.items():
                self.rebalancer.observe_routing(expert, num_tokens, residency.served_by(expert))
        actions = open_layer.enter(layer, tokens_of, on_host)
        if self._moved.unused:
            self._moved.use(actions)
        if residency.is_prefilling:
            self._last_counts.update(tokens_of)
        if open_layer.missing:
            actions += open_layer.fetch_missing(self._staging.expected)
        if on_host and not open_layer.missing:
            # What the layer computes is not pinned where nothing is waited for.
            protected = self._staging.expected.union(tokens_of)
            actions += self._host.bring_back(residency, protected)
        return actions + self._staging.enter_layer(layer) if self.is_staging else actions

    @observation
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

    @observation
    def predict_far(self, picks: Sequence[FarPick]) -> list[Action]:
        """A far head expects these experts in all later layers. After `enter_layer`.

        Args:
            picks: Layer, expert and probability of a use, nearest layer first, likeliest first.

        Returns:
            Fetches to submit; skips and declines. What finds no room follows with `landed`.
        """
        skips = self._staging.expect_far(self.open_layer.number, picks, self.residency)
        return [*skips, *self._stage()]

    def _stage(self) -> list[Action]:
        """Moves what is predicted, nearest layer first, while the link has room."""
        setup, residency = self._setup, self.residency
        # A prompt's pass needs most of a layer: the next one's share of the slots fills while
        # this one computes.
        limit = setup.num_experts if residency.is_prefilling else setup.max_predicted
        return self._note_moves(self._staging.fetch(residency, self.open_layer.tokens_of, limit))

    def _note_moves(self, actions: list[Action]) -> list[Action]:
        """Takes in what was decided ahead of its use. A prompt's passes use all they can get."""
        if actions and not self.residency.is_prefilling:
            self._moved.add(actions)
        return actions

    @observation
    def landed(self, slot: int) -> list[Action]:
        """A load has ended well.

        Returns:
            The expert's computation where it is waited for; fetches that had to wait for a
            slot that may be given up.
        """
        residency, layer = self.residency, self.open_layer
        residency.complete(slot)
        expert = residency.expert_in(slot)
        actions: list[Action] = []
        if expert in layer.waiting:
            actions.append(layer.waiting.pop(expert))
        if layer.missing:
            actions += layer.fetch_missing(self._staging.expected)
        if not layer.missing and self._staging.is_waiting:
            actions += self._stage()
        return actions

    @observation
    def failed(self, slot: int) -> list[Action]:
        """A load has failed. Where nobody waits for it, it only loses its slot.

        Returns:
            Fetches that the slot is free for now.
        """
        if self.residency.is_pinned(slot):
            self._failed.append(slot)
            return []
        self.residency.abandon(slot)
        return self.open_layer.fetch_missing(self._staging.expected)

    @observation
    def computed(self, slots: Sequence[int]) -> list[Action]:
        """The tokens of the experts in these slots are done: the slots may go to missing ones."""
        layer = self.open_layer
        layer.unpin(slots)
        return layer.fetch_missing(self._staging.expected) if layer.missing else []

    @observation
    def leave_layer(self) -> list[Action]:
        """The layer is done, or was broken off: nothing of it is waited for or pinned."""
        layer = self.open_layer
        layer.leave()
        return self.residency.leave_layer(layer.number) if self._has_regions else []

    # -- drafting --------------------------------------------------------------------------

    @observation
    def begin_draft(self, num_tokens: int, is_prefetching: bool) -> list[Action]:
        """A draft window begins: the counters are cleared.

        Args:
            num_tokens: K.
            is_prefetching: Whether anything may be moved ahead.

        Returns:
            `DraftOn` up to the first boundary, if there is one.
        """
        is_fetching = (
            is_prefetching and not self.flood.is_passing_through and self.payoff.begin_round()
        )
        return self._draft.begin(num_tokens, is_fetching=is_fetching)

    @observation
    def draft_routed(self, layer: int, experts: Sequence[int]) -> list[Action]:
        """A draft's router has chosen. Returns fetches of what is missing."""
        return self._note_moves(self._draft.routed(layer, experts))

    @observation
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
        return self._note_moves(self._draft.reach_boundary(num_drafted, counts))

    @observation
    def end_draft(self, num_drafted: int, draft_s: float) -> list[Action]:
        """The draft is over, after `draft_s` seconds, planning left out."""
        self._draft.end(num_drafted, draft_s)
        return []

    # -- passes and replies ----------------------------------------------------------------

    @observation
    def begin_prefill(self, num_passes: int) -> list[Action]:
        """A prompt's pass begins, with so many still to come, itself included.

        HOT keeps its experts from now on. Without regions, and as long as there is another
        pass, so does everything that is there, and what takes another's slot passes through.
        """
        self.residency.begin_prefill()
        self.flood.begin_prompt(num_passes)
        self._last_counts.clear()
        return []

    @observation
    def end_prefill(self) -> list[Action]:
        """The prompt is read. Returns the swaps that warm HOT by what its end was routed to."""
        self.residency.end_prefill()
        self.flood.end_prompt()
        if not self._is_rebalanced:
            return []
        return self.rebalancer.warm(self.residency, self._last_counts)

    @observation
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
        self._moved.end_pass(
            {FetchReason.LOOKAHEAD: planning_s, FetchReason.PREDICTED: predicting_s},
            record_s=self.planner.record_s,
            num_missed=self.open_layer.take_num_fetched(),
            round_s=round_s,
        )
        if self._host is not None:
            self._host.end_pass(host_s)
        actions: list[Action] = list(self._staging.begin_pass())
        self._is_prediction_wanted = self.prediction_payoff.begin_round()
        self.residency.end_window()
        if self._is_rebalanced:
            self.rebalancer.observe_tokens(num_tokens)
            if self.rebalancer.is_due():
                actions += self.rebalancer.decide(self.residency)
        return actions

    @observation
    def fill_hot(self, experts: Sequence[tuple[int, int]]) -> list[Action]:
        """Fetches experts, given as layer and number, into HOT while it has room."""
        return self.rebalancer.fill(self.residency, experts)

    @observation
    def allow_host(self, is_allowed: bool) -> list[Action]:
        """Says whether the processor may compute misses in the reply that begins."""
        if self._host is not None:
            self._host.is_allowed = is_allowed
        return []

    @observation
    def end_reply(self) -> list[Action]:
        """The reply has ended in any way: failed loads give their slots up."""
        self.open_layer.leave()
        for slot in self._failed:
            self.residency.abandon(slot)
        self._failed.clear()
        self.flood.end_reply()
        if self._host is not None:
            self._host.end_reply()
        self._draft.break_off()
        self._moved.forget()
        self._staging.begin_pass()
        self.residency.end_window()
        self.residency.end_prefill()
        return []
