"""The engine's own parts around a random model whose routing and acceptance are set.

Attention, norms, routers and output layer are the real ones of the shape, with random
weights; executor, driver, link, passes, draft and verification are the engine's. Two things
are put in: the experts that a router would have chosen (`ReplayedRouting`), and how many draft
tokens stand (`SetAcceptance`), since a random model's own say nothing. On a card steps are
recorded as the engine records them, the put-in choice included (`RoutedModel`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fake_queues import FakeQueues
from gpu.card import DEVICE, HAS_CARD, num_device_allocations, synchronize
from gpu.records import HostRecords, fill_random
from gpu.replayed_routing import ReplayedRouting, RoutedModel
from gpu.shapes import Shape
from gpu.timeline import RecordedTransfer, Recorder, Span
from gpu.trace_routing import Routing
from mira_engine.checkpoint.experts import expert_modules_of
from mira_engine.checkpoint.store import StoreManifest
from mira_engine.config import EngineConfig, SamplingConfig
from mira_engine.events import MemoryPlan
from mira_engine.load_plan import LoadPlan
from mira_engine.model.experts import stamp
from mira_engine.model.kv import StateManager
from mira_engine.model.linear import DenseSwitch
from mira_engine.model.sampling import DraftToken, Sampler
from mira_engine.policy.cost_model import CACHED_EXPONENT
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.profiles import ProfileKey
from mira_engine.runtime.captured import CapturedSteps, captured_steps
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.draft import DraftStage, DraftWindow
from mira_engine.runtime.executor import ExpertExecutor
from mira_engine.runtime.gpu_device import GpuDevice, GpuHandle, form_of
from mira_engine.runtime.gpu_experts import GpuExperts, never_bound
from mira_engine.runtime.gpu_records import GpuArena, GpuDraft, GpuSlotDraft
from mira_engine.runtime.graphs import CudaGraphs, Graphs
from mira_engine.runtime.host_memory import PinnedSource, pageable, pinned
from mira_engine.runtime.passes import ModelPasses
from mira_engine.runtime.slots import slot_planes
from mira_engine.runtime.streams import CudaQueues, Queues
from mira_engine.types import DraftExperts, ExpertId, Phase
from torch import Tensor
from transformers import PreTrainedModel

ACCEPTANCE = 0.9663
"""Chance of a draft token: set, not measured. Source: Specter, choice of K, mean over its models
with a GPTQ draft of all experts."""


class SetAcceptance(Sampler):
    """Draws as a greedy sampler does, and accepts as it is told.

    Args:
        chance: Gives the chance of a draft token whose predecessors all stood, each round.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        super().__init__(SamplingConfig())
        self._chance = chance
        self._random = random.Random(0)

    def accept(
        self, history: Sequence[int], drafted: Sequence[DraftToken], logits: Tensor
    ) -> tuple[int, int]:
        """Returns how many drafted tokens stand, and the target's token after them."""
        chance, count = self._chance(), 0
        while count < len(drafted) and self._random.random() < chance:
            count += 1
        return count, self.draw(history, logits[count]).token


class OrderedTransfer(CudaTransfer):
    """A link on lanes without a card, where what kernels read is held against the copies."""

    def acquire(self, slots: Iterable[int]) -> None:
        """Kernels that are launched from now on may read these slots."""
        slots = list(slots)
        super().acquire(slots)
        for slot in slots:
            for part in self._slots[slot].values():
                self._queues.read(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one run is made of.

    Attributes:
        shape: Whose model.
        model: Its backbone.
        config: Policies, and the link's rate.
        plan: Slots and draft.
        routing: What is replayed.
        host: Records to copy from.
    """

    shape: Shape
    model: PreTrainedModel
    config: EngineConfig
    plan: MemoryPlan
    routing: Routing
    host: HostRecords


class ReplayedEngine:
    """One conversation of a random model under a memory plan.

    Args:
        setting: Everything about it.
        recorder_of: Makes a recorder of the lanes, `None` for none. Marks cannot be put into
            recorded steps: with a recorder passes run module by module.
        graphs_of: Records steps, `None` for what the device has.
    """

    def __init__(
        self,
        setting: Setting,
        recorder_of: Callable[[Queues], Recorder] | None = None,
        graphs_of: Callable[[Queues], Graphs] | None = None,
    ) -> None:
        self._setting = setting
        self.notices: list[str] = []
        """Codes and texts of what could not be recorded."""
        plan, config, model = setting.plan, setting.config, setting.model
        queues = CudaQueues(DEVICE) if HAS_CARD else FakeQueues()
        self.recorder = recorder_of(queues) if recorder_of is not None else None
        graphs = None
        if self.recorder is None and (HAS_CARD or graphs_of is not None):
            graphs = graphs_of(queues) if graphs_of is not None else CudaGraphs(DEVICE)
        self._make_device(GpuHandle(device=DEVICE, queues=queues, allocate=_taken, graphs=graphs))
        self.routing = ReplayedRouting(self.executor, setting.routing, self.recorder)
        stamp(model, self.routing)
        self.state = StateManager(
            model,
            capacity=len(setting.routing.target),
            is_rollback_wanted=plan.num_draft_tokens > 0,
        )
        self.routing.state = self.state
        self.passes = ModelPasses(
            model, self.executor, self.state, DenseSwitch(), device=model.device
        )
        self.captured = self._record_steps()
        self.passes.captured = self.captured
        window = DraftWindow(self.executor, is_prefetch_enabled=config.is_prefetch_enabled)
        self.draft_stage = DraftStage(self.passes, window)
        self.sampler = SetAcceptance(self._chance)
        self.history: list[int] = []

    def _record_steps(self) -> CapturedSteps | None:
        """Has passes recorded as the engine has them, where the device can."""
        setting, notices = self._setting, self.notices
        steps = captured_steps(
            setting.model,
            self.executor,
            self.state,
            self._device,
            lambda code, text: notices.append(f"{code}: {text}"),
        )
        if steps is not None:
            steps.use_depths({setting.plan.num_draft_tokens})
            steps._model = RoutedModel(setting.model, self.routing, self.executor, self.state)
        return steps

    def _make_device(self, handle: GpuHandle) -> None:
        """Allocates slots and draft, opens the link, and sets the driver up as the engine does."""
        setting, queues = self._setting, handle.queues
        shape, plan, config = setting.shape, setting.plan, setting.config
        fmt = shape.format(config.precision)
        is_beside = plan.num_draft_tokens > 0 and plan.draft_experts is DraftExperts.ALL
        draft: GpuDraft | GpuSlotDraft | None = None
        if is_beside:
            draft = _random_draft(shape, fmt)
        elif plan.num_draft_tokens:
            draft = GpuSlotDraft()
        slots = GpuArena(plan.num_slots, slot_planes(fmt, has_draft=is_beside), fmt, DEVICE)
        experts = [
            ExpertId(layer, expert)
            for layer in range(shape.num_layers)
            for expert in range(shape.num_experts)
        ]
        wanted = len(experts) * sum(slots.plane_bytes.values())
        source = PinnedSource(
            setting.host.for_all(wanted), experts, slots.plane_bytes, _leave_as_it_is
        )
        rate = config.link.bytes_per_s
        if self.recorder is not None:
            self.transfer: CudaTransfer = RecordedTransfer(
                self.recorder, queues, source, slots.records, bytes_per_s=rate
            )
        else:
            kind = CudaTransfer if HAS_CARD else OrderedTransfer
            self.transfer = kind(queues, source, slots.records, bytes_per_s=rate)
        modules = [module for _, module in expert_modules_of(setting.model)]
        driver = ExpertCacheDriver(_cache_setup(setting, fmt, self.transfer.record_bytes))
        self.executor = ExpertExecutor(
            driver=driver, transfer=self.transfer, bind=never_bound, draft=draft
        )
        experts_on_card = GpuExperts(
            fmt,
            form_of(modules, shape.family, config.precision),
            slots,
            self.transfer,
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            draft=draft,
            device=DEVICE,
        )
        self.executor.use_fused(experts_on_card)
        self._device = GpuDevice(
            handle=handle, slots=slots, draft=draft, transfer=self.transfer, experts=experts_on_card
        )

    def _chance(self) -> float:
        """The paper's chance; less where the draft does without some experts, by as much as the
        engine's own predictions say."""
        return ACCEPTANCE * self.routing.take_share_present() ** CACHED_EXPONENT

    def read_prompt(self, num_tokens: int) -> None:
        """Reads a prompt as the engine does, HOT's warm-up included."""
        driver = self.executor.driver
        prompt = list(range(1, num_tokens + 1))
        self.executor.obey(driver.begin_prefill(1))
        self.state.mark()
        logits = self.passes.forward(prompt, Phase.PREFILL)
        self.state.rollback(0)
        self.executor.obey(driver.end_prefill())
        self.history = [*prompt, self.sampler.draw(prompt, logits[-1]).token]

    def round(self) -> int:
        """One target pass, with a draft before it where K is above 0. Returns the new tokens."""
        meter, history = self.executor.meter, self.history
        num_draft = self._setting.plan.num_draft_tokens
        drafted = []
        if num_draft and self.captured is not None:
            for number in range(num_draft):  # Recorded passes ask nobody while they run.
                for layer in range(self._setting.shape.num_layers):
                    self.routing.count_present(self.state.num_cached + number, layer)
        if num_draft:
            drafted = self.draft_stage.run(history, num_draft, self.sampler, ())
        started = time.perf_counter()
        candidates = [history[-1], *(d.token for d in drafted)]
        phase = Phase.VERIFY if drafted else Phase.DECODE
        logits = self.passes.forward(candidates, phase, num_logits=len(candidates))
        num_accepted, following = self.sampler.accept(history, drafted, logits)
        self.state.rollback(len(drafted) - num_accepted)
        meter.verify_s += time.perf_counter() - started
        meter.num_rounds += 1
        meter.num_accepted += num_accepted
        self.executor.end_pass(num_accepted + 1)
        self.history += [*(d.token for d in drafted[:num_accepted]), following]
        return num_accepted + 1

    def run(self, num_tokens: int, *, num_warm_tokens: int) -> dict[str, Any]:
        """Decodes. Returns the figures of what followed the warm-up; no times without a card."""
        self._decode(num_warm_tokens)
        meter = self.executor.meter
        before, traffic = replace(meter), replace(meter.decode)
        allocations = num_device_allocations()
        synchronize()
        started = time.perf_counter()
        made = self._decode(num_tokens)
        synchronize()
        elapsed = time.perf_counter() - started
        now = meter.decode
        hits, misses = now.num_hits - traffic.num_hits, now.num_misses - traffic.num_misses
        moved = now.num_bytes - traffic.num_bytes
        rounds = meter.num_rounds - before.num_rounds
        num_prefetched = now.num_prefetched - traffic.num_prefetched
        figures: dict[str, Any] = {
            "num_tokens": made,
            "hit_rate": hits / max(1, hits + misses),
            "mb_per_token": moved / made / 1e6,
            "num_prefetched": num_prefetched,
            "num_prefetch_used": now.num_prefetch_used - traffic.num_prefetch_used,
            "accepted_per_round": (meter.num_accepted - before.num_accepted) / rounds,
            "num_device_allocations": num_device_allocations() - allocations,
            "num_recorded_passes": meter.num_compiled_passes - before.num_compiled_passes,
            "num_launched_passes": meter.num_eager_passes - before.num_eager_passes,
            "notices": self.notices,
            "ms_per_token": None,
        }
        if HAS_CARD:
            figures |= {
                "ms_per_token": 1e3 * elapsed / made,
                "stall_ms": 1e3 * (now.stall_s - traffic.stall_s) / made,
                "draft_ms": 1e3 * (meter.draft_s - before.draft_s) / made,
                "target_ms": 1e3 * (meter.verify_s - before.verify_s) / made,
                "link_gb_per_s": moved / elapsed / 1e9,
            }
        return figures

    def _decode(self, num_tokens: int) -> int:
        made = 0
        while made < num_tokens:
            made += self.round()
        return made

    def record_round(self) -> list[Span]:
        """Runs one more round. Returns what the lanes did."""
        assert self.recorder is not None
        self.recorder.start()
        self.round()
        return self.recorder.stop()

    def close(self) -> None:
        """Waits for what is under way, and takes the device's memory from the model."""
        self.executor.driver.end_reply()
        self.transfer.close()
        stamp(self._setting.model, _closed)


def _cache_setup(setting: Setting, fmt: Any, record_bytes: int) -> Any:
    """What the engine sets its driver up with under this plan."""
    shape, plan, config = setting.shape, setting.plan, setting.config
    manifest = StoreManifest.of_format(
        fmt, num_layers=shape.num_layers, num_experts=shape.num_experts, source="", revision=""
    )
    key = ProfileKey.of_engine(
        config, machine="", model_revision="", budget_bytes=plan.budget_bytes
    )
    load_plan = LoadPlan(
        memory=plan,
        top_k=shape.top_k,
        profile_key=key,
        profile=None,
        is_k_chosen=True,
        first_k=plan.num_draft_tokens,
    )
    return load_plan.cache_setup(config, manifest, record_bytes)


def _taken(num_bytes: int) -> Tensor:
    return pinned(num_bytes) if HAS_CARD else pageable(num_bytes)


def _random_draft(shape: Shape, fmt: Any) -> GpuDraft:
    plane = fmt.draft_plane
    draft = GpuDraft(fmt, plane, shape.num_layers, shape.num_experts, _leave_as_it_is, DEVICE)
    fill_random(draft.arena.data[plane].view(-1, fmt.record_bytes(plane)), fmt, plane)
    return draft


def _closed(*arguments: object) -> Tensor:
    """Stands in a model whose engine is gone."""
    raise AssertionError("this model has no experts any more")


def _leave_as_it_is(expert: ExpertId, plane: Any, target: Tensor) -> None:
    """The records are random already."""
