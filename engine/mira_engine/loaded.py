"""A loaded model: backbone, experts' device, cache and passes, as planned.

Everything that stays from reply to reply: how it is planned and loaded, on which device it
is arranged, what is taken up or changed in between, and what people are told of it. Knows
nothing of chats and sampling. Runs in the engine thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

from .config import EngineConfig
from .errors import StoreError, check_cancelled
from .events import Notice
from .fallbacks import load_fallbacks, unusable_predictors
from .library import ModelHome
from .load_plan import LoadPlan, OnNotice, make_load_plan, open_stores
from .model.chat import end_token_ids, has_tokenizer, load_tokenizer
from .model.experts import stamp
from .model.facts import context_length, longest_context
from .model.kv import StateManager
from .model.linear import DenseSwitch
from .model.loader import load_backbone
from .policy.driver import ExpertCacheDriver
from .predictor.bank import MANIFEST_FILE, PredictorBank
from .runtime import gpu_device
from .runtime.captured import CapturedSteps, captured_steps
from .runtime.device import ExpertDevice
from .runtime.draft import DraftStage, DraftWindow
from .runtime.executor import ExpertExecutor
from .runtime.gpu_device import GpuDevice, settle_dtype
from .runtime.gpu_experts import never_bound
from .runtime.native_path import NativePath
from .runtime.passes import ModelPasses
from .runtime.placing import place_experts
from .runtime.probe import bound_kernel_cache, default_num_threads
from .runtime.shortage import as_shortage, give_memory_back
from .runtime.telemetry import MemoryProbe
from .trace import TraceHeader, TraceRecorder
from .types import CompileMode, ExpertId, PredictionLead


class LoadedModel:
    """One model on one device, ready to run passes.

    Between replies whenever something is changed here.
    """

    def __init__(
        self,
        *,
        home: ModelHome,
        config: EngineConfig,
        cache_dir: Path | None,
        on_notice: OnNotice,
        is_cancelled: Callable[[], bool],
        draft_depths: Collection[int] | None = None,
    ) -> None:
        self.home = home
        config = settle_dtype(config)
        self._cache_dir = cache_dir if config.compile_mode is not CompileMode.OFF else None
        self._profile_dir = cache_dir
        self.config = config
        self._notify = on_notice
        self._is_load_cancelled = is_cancelled
        self._cancelled = threading.Event()
        self._told: set[str] = set()
        self._probe = MemoryProbe()
        started = time.perf_counter()
        bound_kernel_cache()
        torch.set_num_threads(config.num_threads or default_num_threads())
        self._target, self._draft_source = open_stores(home, config.precision)
        load_plan = make_load_plan(
            home,
            config,
            self._target,
            self._draft_source,
            profile_dir=cache_dir,
            on_notice=on_notice,
        )
        self._draft_depths = draft_depths
        self._top_k = load_plan.top_k
        self.link_bytes_per_s = load_plan.link_bytes_per_s
        self._take_plan(load_plan)
        self._closing = ExitStack()
        """What has to be ended by hand, the last begun first."""
        self._arrange_or_close(load_plan)
        self.load_s = time.perf_counter() - started

    @classmethod
    def load(
        cls,
        home: ModelHome,
        config: EngineConfig,
        *,
        cache_dir: Path | None = None,
        on_notice: OnNotice | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        draft_depths: Collection[int] | None = None,
    ) -> Self:
        """Plans, then loads a prepared model.

        Args:
            home: A model that is ready in `config.precision`.
            config: Precision, budget, K and the rest.
            cache_dir: Where native kernels and compiled steps are kept; `None` for none.
            on_notice: Told every fallback, from the calling or a background thread.
            is_cancelled: Asked between the steps of loading.
            draft_depths: What the governor may choose besides 0 and the plan's K; `None` for
                all up to that K.

        Raises:
            CancelledError: `is_cancelled` said so.
            StoreError: The model is not prepared in that precision, or damaged.
            BudgetError: The budget is below what is needed; nothing was loaded.
            MemoryShortageError: There was less memory than planned; nothing is held any more.
            ConfigError: The device has not the arithmetic that was asked for.
        """
        return cls(
            home=home,
            config=config,
            cache_dir=cache_dir,
            on_notice=on_notice or (lambda notice: None),
            is_cancelled=is_cancelled,
            draft_depths=draft_depths,
        )

    def _take_plan(self, load_plan: LoadPlan) -> None:
        self.plan = load_plan.memory
        self.profile_key = load_plan.profile_key
        self._fixed_depth = load_plan.fixed_depth()
        self.governor = load_plan.governor(self._draft_depths)

    def plan_for(self, config: EngineConfig) -> LoadPlan:
        """Plans another configuration of this model, in the memory that this one would leave.

        Raises:
            StoreError: The model is not prepared in that precision, or damaged.
            BudgetError: It does not fit.
        """
        return make_load_plan(
            self.home,
            settle_dtype(config),
            *open_stores(self.home, config.precision),
            profile_dir=self._profile_dir,
            on_notice=lambda notice: None,
            reusable_bytes=min(self.plan.total_bytes, self._held_bytes()),
        )

    def adopt(self, config: EngineConfig, load_plan: LoadPlan) -> None:
        """Goes over to another K or prefetch switch; slots and conversation stay.

        Between replies. `mira_engine.reconfiguring` says when that suffices.

        Args:
            config: Differs from the one in force in these alone.
            load_plan: Of it, with this device's slots.
        """
        was_enabled, depth_before = self.config.is_prefetch_enabled, self.plan.num_draft_tokens
        self.config = config
        self._take_plan(load_plan)
        if config.is_prefetch_enabled is not was_enabled:
            self._load_predictor()
        window = DraftWindow(self.executor, is_prefetch_enabled=config.is_prefetch_enabled)
        self.draft_stage = DraftStage(self.passes, window)
        self._use_depths()
        if self.native_path is not None and self.plan.num_draft_tokens > depth_before:
            depths = self.governor.candidates if self.governor is not None else ()
            self.native_path.deepen(self.plan, depths)

    def _arrange_or_close(self, load_plan: LoadPlan) -> None:
        """Loads; where that is broken off, ends what it has begun."""
        shortage = None
        try:
            self._arrange_device(load_plan)
            check_cancelled(self._is_load_cancelled)
        except BaseException as error:
            self.close()
            shortage = as_shortage(error, "while the model was loaded", self.plan)
            if shortage is None:
                raise
        if shortage is not None:
            raise shortage

    def _arrange_device(self, load_plan: LoadPlan) -> None:
        """Loads the backbone, allocates the arenas, and connects model and executor."""
        manifest, config = self._target.manifest, self.config
        folder = self.home.backbone_dir
        check_cancelled(self._is_load_cancelled)
        self.model = load_backbone(folder, config.arithmetic)
        switch = DenseSwitch()
        check_cancelled(self._is_load_cancelled)
        self._tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        self._end_ids = end_token_ids(folder, self.model.config, self._tokenizer)
        self.context_length = context_length(self.model.config, config.context_length)
        device = place_experts(
            self.model,
            self.plan,
            config,
            self._target,
            self._draft_source,
            cache_dir=self._cache_dir,
            is_cancelled=self._is_load_cancelled,
            tell=self._notice,
        )
        self.transfer = device.transfer
        self._closing.callback(device.transfer.close)
        self._spill = device.spill if isinstance(device, GpuDevice) else None
        self.cache_setup = load_plan.cache_setup(config, manifest, device.transfer.record_bytes)
        self._connect(device)
        self.state = StateManager(
            self.model,
            capacity=self.context_length,
            is_rollback_wanted=self.plan.num_draft_tokens > 0,
        )
        self.passes = ModelPasses(
            self.model, self.executor, self.state, switch, device=self.model.device
        )
        self.captured: CapturedSteps | None = None
        if isinstance(device, GpuDevice) and config.compile_mode is not CompileMode.OFF:
            self.captured = captured_steps(
                self.model, self.executor, self.state, device, self._notice
            )
            self.passes.captured = self.captured
            self._use_depths()
        self._has_recorded = False
        self._tell_load_fallbacks()
        window = DraftWindow(self.executor, is_prefetch_enabled=config.is_prefetch_enabled)
        self.draft_stage = DraftStage(self.passes, window)
        self.native_path: NativePath | None = None
        if self._cache_dir is not None and isinstance(device, ExpertDevice):
            self._start_native(device, self._cache_dir, switch)

    def _connect(self, device: ExpertDevice | GpuDevice) -> None:
        """Makes the executor on a device, and has the model's experts computed by it."""
        if isinstance(device, GpuDevice):
            self.cache_setup = replace(self.cache_setup, host=device.host_setup)
        self.executor = ExpertExecutor(
            driver=ExpertCacheDriver(self.cache_setup),
            transfer=device.transfer,
            bind=device.bind if isinstance(device, ExpertDevice) else never_bound,
            draft=device.draft,
        )
        if isinstance(device, GpuDevice):
            self.executor.use_fused(device.experts)
            self.executor.host = device.host
            if device.host is not None:
                self._closing.callback(device.host.close)
        self.executor.is_cancelled = self._cancelled.is_set
        self._load_predictor()
        if self.config.trace_path is not None:
            self.executor.recorder = TraceRecorder(self._trace_header())
        num_stamped, num_layers = stamp(self.model, self.executor), self.cache_setup.num_layers
        if num_stamped != num_layers:
            raise StoreError(
                f"The store has {num_layers} MoE layers, the model {num_stamped}.",
                hint="Remove the model and prepare it again.",
            )

    def _start_native(self, device: ExpertDevice, cache_dir: Path, switch: DenseSwitch) -> None:
        """Has native kernels and compiled steps made ready in the background."""
        self.native_path = NativePath(
            model=self.model,
            folder=self.home.backbone_dir,
            config=self.config,
            plan=self.plan,
            cache_dir=cache_dir,
            passes=self.passes,
            executor=self.executor,
            switch=switch,
            target=self._target,
            draft_source=self._draft_source,
            slots=device.slots,
            bind=device.bind,
            draft_depths=self.governor.candidates if self.governor is not None else (),
            on_notice=self._notice,
        )
        self._closing.callback(self.native_path.close)
        self.native_path.start(self._is_load_cancelled)

    def _use_depths(self) -> None:
        """Says which lengths a target pass on a card will have."""
        if self.captured is not None:
            depths = self.governor.candidates if self.governor is not None else ()
            self.captured.use_depths({self.plan.num_draft_tokens, *depths})

    def _load_predictor(self) -> None:
        self.executor.predictor = None
        if not (self.config.is_predicting and self.config.is_prefetch_enabled):
            return
        revision = self._target.manifest.revision
        bank = PredictorBank.load(self.home.predictors_dir, revision)
        if bank is not None and self.config.prediction_lead is PredictionLead.NEAR:
            bank.far_heads.clear()
        self.executor.predictor = bank
        if bank is None:
            folder = self.home.predictors_dir
            reason = unusable_predictors(
                self.home.name,
                is_made=(folder / MANIFEST_FILE).exists(),  # It is written last.
                is_begun=folder.is_dir(),
            )
            if reason is not None:
                self._notice("no-predictors", reason)

    def _trace_header(self) -> TraceHeader:
        return TraceHeader(
            model=self.home.title,
            precision=self.config.precision,
            num_layers=self.cache_setup.num_layers,
            num_experts=self.cache_setup.num_experts,
            top_k=self._top_k,
            num_draft_tokens=self.plan.num_draft_tokens,
            num_slots=self.plan.num_slots,
            record_bytes=self.transfer.record_bytes,
            budget_bytes=self.plan.budget_bytes,
            eviction=self.cache_setup.eviction,
        )

    def fill_hot(self, experts: Sequence[ExpertId]) -> None:
        """Loads experts into HOT while it has room, in this order. Between replies."""
        self.executor.obey(self.executor.driver.fill_hot([tuple(e) for e in experts]))
        while self.executor.driver.residency.num_loading:
            self.executor.collect(self.transfer.wait_any(1.0))

    def take_compiled(self) -> None:
        """Takes up what the background has compiled. Between replies only.

        The first time it can take a second. Every reply begins with it; to call it when a
        reply has ended spares the next one that second.
        """
        if self.native_path is None or not self.native_path.take():
            return
        if self.governor is not None:
            self.governor.forget_costs()

    def _tell_load_fallbacks(self) -> None:
        has_draft = self.executor.draft is not None
        fallbacks = load_fallbacks(
            self.config,
            self.plan,
            self._target.format,
            self._draft_source.format if has_draft else None,
            is_memory_exact=self._probe.is_exact,
        )
        for notice in fallbacks:
            self._notify(notice)

    def _tell_once(self, code: str, text: str) -> None:
        if code not in self._told:
            self._told.add(code)
            self._notice(code, text)

    def _notice(self, code: str, text: str) -> None:
        self._notify(Notice(code=code, text=text))

    def give_room_back(self) -> None:
        """Forgets the conversation and gives its room back, recorded steps with it."""
        if self.captured is not None:
            self.captured.forget()
        self.state.release_room()

    def free_temporaries(self) -> None:
        """Gives back what passes have kept for later ones. Between replies."""
        if self.captured is not None:
            self.give_room_back()  # Recordings hold the addresses of what is given back, too.
        self.executor.free_temporaries()
        give_memory_back()

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        return self._end_ids

    @property
    def longest_context(self) -> int:
        """Most tokens that the model can read."""
        return longest_context(self.model.config)

    def _peak_bytes(self) -> int:
        """The most memory held: of the card where one computes, else of the process."""
        if self.config.gpu is None:
            return self._probe.peak_bytes()
        return gpu_device.peak_device_bytes(self.config.gpu)

    def _held_bytes(self) -> int:
        """Memory that this model holds now, on the device."""
        if self.config.gpu is None:
            return self._probe.held_bytes()
        return self.plan.total_bytes

    def close(self) -> None:
        """Stops the readers and what is compiled in the background, gives the memory back."""
        self._closing.close()
