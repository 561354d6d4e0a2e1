"""The engine: load a model, stream a reply, cancel, close.

`Engine.reply` has the one loop to read top to bottom. Everything runs in the thread
that calls it, except the disk readers; `cancel` may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from .checkpoint.experts import expert_modules_of
from .checkpoint.store import ExpertStore
from .config import EngineConfig, SamplingConfig
from .conversing import ChatStream, Replier, ReplyEvent
from .errors import (
    CancelledError,
    ConfigError,
    ContextLengthError,
    MemoryShortageError,
    StoreError,
    check_cancelled,
)
from .events import ChatMessage, Notice, ReplyStats, ResidencySample
from .fallbacks import load_fallbacks
from .library import ModelHome
from .load_plan import LoadPlan, make_load_plan
from .model.batch_state import can_pad
from .model.chat import end_token_ids, has_tokenizer, load_tokenizer
from .model.experts import stamp
from .model.facts import context_length, longest_context
from .model.kv import StateManager
from .model.linear import DenseSwitch
from .model.loader import load_backbone
from .model.sampling import Sampler
from .policy.driver import ExpertCacheDriver
from .policy.speculation import DepthPolicy, FixedDepth, RoundObservation
from .predictor.bank import MANIFEST_FILE, PredictorBank
from .runtime import gpu_device
from .runtime.batch import BatchDecoder
from .runtime.beam import BeamResult, beam_search
from .runtime.device import ExpertDevice, make_device
from .runtime.draft import DraftStage, DraftWindow
from .runtime.executor import ExpertExecutor
from .runtime.expert_map import RoutingHeat, region_rows
from .runtime.gpu_device import GpuDevice, form_of, make_gpu_device, settle_dtype
from .runtime.gpu_experts import never_bound
from .runtime.native_path import NativePath
from .runtime.passes import ModelPasses
from .runtime.probe import bound_kernel_cache, default_num_threads
from .runtime.reply_so_far import ReplySoFar
from .runtime.requests import BatchEvent, Request, in_turn, make_requests
from .runtime.shortage import as_shortage, give_memory_back, smaller_chunk
from .runtime.telemetry import LiveSamples, MemoryProbe, ReplyMeter
from .trace import TracedRound, TraceHeader, TraceRecorder
from .types import (
    CompileMode,
    DraftExperts,
    ExpertId,
    FinishReason,
    Phase,
    Precision,
    PredictionLead,
)

OnNotice = Callable[[Notice], None]


class Engine:
    """One loaded model.

    Build with `Engine.load`. Not thread-safe but for `cancel`.
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
        self._target, self._draft_source = _open_stores(home, config.precision)
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
        self.on_round: Callable[[RoundObservation], None] | None = None
        """Told what each round did, in the thread that asked for the reply."""
        self._num_reading = 0
        """Prompt tokens of the pass under way, 0 in any other."""
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
    ) -> Engine:
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

    # -- loading ---------------------------------------------------------------------------

    def _take_plan(self, load_plan: LoadPlan) -> None:
        self.plan = load_plan.memory
        self.profile_key = load_plan.profile_key
        self._fixed_depth = load_plan.fixed_depth()
        self.governor = load_plan.governor(self._draft_depths)
        self._first_depth = load_plan.first_k

    def plan_for(self, config: EngineConfig) -> LoadPlan:
        """Plans another configuration of this model, in the memory that this one would leave.

        Raises:
            StoreError: The model is not prepared in that precision, or damaged.
            BudgetError: It does not fit.
        """
        return make_load_plan(
            self.home,
            settle_dtype(config),
            *_open_stores(self.home, config.precision),
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
        tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        self._end_ids = end_token_ids(folder, self.model.config, tokenizer)
        self._chats = ChatStream(tokenizer)
        self.context_length = context_length(self.model.config, config.context_length)
        device = self._make_gpu_device() if config.gpu is not None else self._make_device()
        self.transfer = device.transfer
        self._closing.callback(device.transfer.close)
        self.cache_setup = load_plan.cache_setup(config, manifest, device.transfer.record_bytes)
        self.executor = ExpertExecutor(
            driver=ExpertCacheDriver(self.cache_setup),
            transfer=device.transfer,
            bind=device.bind if isinstance(device, ExpertDevice) else never_bound,
            draft=device.draft,
        )
        if isinstance(device, GpuDevice):
            self.executor.use_fused(device.experts)
        self.executor.is_cancelled = self._cancelled.is_set
        self._load_predictor()
        if config.trace_path is not None:
            self.executor.recorder = TraceRecorder(self._trace_header())
        num_stamped = stamp(self.model, self.executor)
        if num_stamped != manifest.num_layers:
            raise StoreError(
                f"The store has {manifest.num_layers} MoE layers, the model {num_stamped}.",
                hint="Remove the model and prepare it again.",
            )
        self.state = StateManager(
            self.model,
            capacity=self.context_length,
            is_rollback_wanted=self.plan.num_draft_tokens > 0,
        )
        self._num_verified = 0
        """Cached tokens whose state the target made; a draft in progress adds others."""
        self.passes = ModelPasses(
            self.model, self.executor, self.state, switch, device=self.model.device
        )
        self._tell_load_fallbacks()
        window = DraftWindow(self.executor, is_prefetch_enabled=config.is_prefetch_enabled)
        self.draft_stage = DraftStage(self.passes, window)
        self.native_path: NativePath | None = None
        if self._cache_dir is not None and isinstance(device, ExpertDevice):
            self.native_path = NativePath(
                model=self.model,
                folder=folder,
                config=config,
                plan=self.plan,
                cache_dir=self._cache_dir,
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

    def _make_device(self) -> ExpertDevice:
        return make_device(
            self.plan,
            self.config,
            self._target,
            self._draft_source,
            is_cancelled=self._is_load_cancelled,
        )

    def _make_gpu_device(self) -> GpuDevice:
        """Moves the backbone to the card, and builds slots, draft and link there."""
        assert self.config.gpu is not None
        modules = [module for _, module in expert_modules_of(self.model)]
        form = form_of(modules, self.model.config.model_type, self.config.precision)
        handle = gpu_device.open_card(self.config.gpu)
        self.model.to(handle.device)
        return make_gpu_device(
            handle,
            self.plan,
            self.config,
            self._target,
            self._draft_source,
            form,
            is_cancelled=self._is_load_cancelled,
            tell=self._notice,
        )

    def _load_predictor(self) -> None:
        self.executor.predictor = None
        if not (self.config.is_predicting and self.config.is_prefetch_enabled):
            return
        revision = self._target.manifest.revision
        bank = PredictorBank.load(self.home.predictors_dir, revision)
        if bank is not None and self.config.prediction_lead is PredictionLead.NEAR:
            bank.far_heads.clear()
        self.executor.predictor = bank
        folder, prepare = self.home.predictors_dir, f"mira-chat prepare {self.home.name}"
        if bank is None and (folder / MANIFEST_FILE).exists():
            self._notice(
                "no-predictors",
                "The predictors are damaged or of other weights and are not used; "
                f"{prepare} makes them anew.",
            )
        elif bank is None and folder.is_dir():  # begun: the manifest is written last
            self._notice(
                "no-predictors", f"The predictors are not trained yet; {prepare} goes on with that."
            )

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

    # -- replies ---------------------------------------------------------------------------

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns a chat's tokens, ready for the assistant's turn."""
        return self._chats.render(messages)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""
        return self._end_ids

    @property
    def longest_context(self) -> int:
        """Most tokens that the model can read."""
        return longest_context(self.model.config)

    def cancel(self) -> None:
        """Stops the running reply at the next layer or draft step. Any thread."""
        self._cancelled.set()

    def clear_cancel(self) -> None:
        """Allows the next reply. Called before a reply is asked for, not inside it."""
        self._cancelled.clear()

    def stream(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingConfig,
        *,
        is_residency_wanted: bool = False,
        replier: Replier | None = None,
    ) -> Iterator[ReplyEvent]:
        """Answers a chat.

        Args:
            request_id: Given in every event.
            messages: The chat.
            sampling: How tokens are chosen.
            is_residency_wanted: Whether pictures of the expert cache are wanted, too.
            replier: Makes the tokens; `None` for this engine. The iterator holds on to nobody
                else, so another engine may take this one's place under it.

        Returns:
            An iterator: `ContextTrimmed` first where the oldest turns were left out, prompt
            progress, text deltas, figures as often as `LiveSamples` says, and at the end
            `GenerationDone`, also when it was cancelled.

        Raises:
            ContextLengthError: System prompt and last question alone do not fit the context.
            GenerationError: The chat template refuses the chat.
            NonFiniteError: nan in the logits.
            StoreError: A record cannot be read.
            MemoryShortageError: Memory ran out; the engine can be used on.
        """
        answering = replier or self
        if is_residency_wanted:
            self._count_heat()
        live = LiveSamples(
            request_id,
            stats=answering.stats,
            residency=answering.residency_sample if is_residency_wanted else None,
        )
        return self._chats.stream(request_id, messages, sampling, live, answering)

    def reply(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        so_far: ReplySoFar | None = None,
    ) -> Generator[int | tuple[int, int], None, FinishReason]:
        """Generates tokens after `prompt`.

        Args:
            prompt: Tokens.
            sampling: How new ones are chosen.
            so_far: A reply to this prompt to go on with, `None` to begin one. What was told
                of it is read and not told again.

        Yields:
            `(done, total)` while the prompt is read, then each new token, the end of
            text included.

        Returns:
            Why it ended.

        Raises:
            MemoryShortageError: Memory ran out. The conversation's state and what passes keep
                are given back; `so_far` can be gone on with, here or in another engine.
        """
        self._num_reading = 0
        try:
            self.take_compiled()
            return (yield from self._new_tokens(so_far or ReplySoFar(prompt, sampling)))
        except Exception as error:
            shortage = as_shortage(error, "in a reply", self.plan)
            if shortage is None:
                raise
        shortage.num_prompt_tokens = self._num_reading
        self._free_temporaries()
        raise shortage

    def _free_temporaries(self) -> None:
        self.executor.free_temporaries()
        give_memory_back()

    def limit_chunks(self, num_tokens: int) -> None:
        """Reads prompts in passes of at most so many tokens from now on. Between replies."""
        self.config = replace(self.config, prefill_chunk_tokens=num_tokens)

    def _new_tokens(
        self, so_far: ReplySoFar
    ) -> Generator[int | tuple[int, int], None, FinishReason]:
        """Makes a reply's tokens, or the rest of them; the one loop."""
        sampling, sampler, history = so_far.sampling, so_far.sampler, so_far.history
        num_prompt, is_begun = so_far.num_prompt_tokens, so_far.num_new_tokens > 0
        meter = self.executor.meter = so_far.meter
        room = self.context_length - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"The chat has {num_prompt} tokens, the context holds {self.context_length}.",
                hint="Shorten the prompt, start a new chat, or give a larger --context "
                f"(this model reads up to {self.longest_context} tokens).",
            )
        limit = min(room, sampling.max_new_tokens or room)
        sampler.rewind()
        depth: DepthPolicy = self._fixed_depth
        if self._is_seed_at_stake(sampling):
            reason = "a seed was given, and the draft depends on the cache"
            depth = FixedDepth(0, reason)
            if self.config.num_draft_tokens:
                self._tell_once(
                    "seed-without-draft",
                    f"-k {self.config.num_draft_tokens} is not used: {reason}; "
                    "--draft-experts all drafts with a seed, too.",
                )
        elif self.governor is not None and (sampling.is_greedy or sampling.seed is None):
            depth = self.governor  # A seed gives the same text only if K does not change.
        meter.num_prompt_tokens = num_prompt
        num_cached = self.state.reuse_prefix(history)
        recorder = self.executor.recorder
        if recorder is not None:
            recorder.start_reply(len(history) - is_begun)
        self._num_verified = self.state.num_cached
        try:
            if is_begun:
                yield from self._read(history[:-1])
            else:
                meter.num_cached_tokens = num_cached
                logits = yield from self._read(history)
                assert logits is not None
                history.append(sampler.draw(history, logits[-1]).token)
                meter.on_token()
                yield history[-1]
            while history[-1] not in self._end_ids:
                made = so_far.num_new_tokens
                if made >= limit:
                    return FinishReason.CONTEXT if limit == room else FinishReason.LENGTH
                num_draft = min(self._num_draft_tokens(depth), limit - made - 1)
                for token in self._round(history, num_draft, sampler):
                    history.append(token)
                    meter.on_token()
                    yield token
                    if token in self._end_ids:
                        break
            return FinishReason.STOP
        except CancelledError:
            self.state.recover(self._num_verified)
            return FinishReason.CANCELLED
        except Exception:
            self.state.reset()  # What it holds may be the cause, nan, or may be half a pass.
            raise
        finally:
            self.executor.driver.end_reply()
            if recorder is not None and self.config.trace_path is not None:
                recorder.write(Path(self.config.trace_path))

    def _is_seed_at_stake(self, sampling: SamplingConfig) -> bool:
        """Whether drafting would make the text depend on more than the seed.

        A draft with the cached experts proposes by what is in the slots, and random numbers
        are drawn for what it proposes.
        """
        is_repeatable = not sampling.is_greedy and sampling.seed is not None
        return is_repeatable and self.plan.draft_experts is DraftExperts.CACHED

    def _read(self, tokens: Sequence[int]) -> Generator[tuple[int, int], None, torch.Tensor | None]:
        """Prefills what is not cached.

        Yields:
            `(done, total)`.

        Returns:
            Logits `[1, V]` of the last token, `None` where all were cached.
        """
        total, chunk = len(tokens), self.config.prefill_chunk_tokens
        logits = None
        while self.state.num_cached < total:
            start = self.state.num_cached
            self._num_reading = min(chunk, total - start)
            num_passes = -(-(total - start) // chunk)
            self.executor.obey(self.executor.driver.begin_prefill(num_passes))
            self.state.mark()
            logits = self.passes.forward(tokens[start : start + chunk], Phase.PREFILL)
            self.state.rollback(0)
            self._num_verified = self.state.num_cached
            yield (self.state.num_cached, total)
        self._num_reading = 0
        if logits is not None:
            self.executor.obey(self.executor.driver.end_prefill())
        return logits

    def _num_draft_tokens(self, depth: DepthPolicy) -> int:
        """K in force: what `depth` says, or 0 where this model's cache cannot be rolled back."""
        choice = depth.choose()
        k, reason = choice.num_draft_tokens, choice.reason
        if self.plan.num_draft_tokens and not self.state.can_roll_back:
            self._tell_once(
                "speculation-off",
                f"Speculation is off: the cache of {self.model.config.model_type} models "
                "keeps a running state that cannot be rolled back.",
            )
            k, reason = 0, "K 0: this model's cache cannot be rolled back."
        meter = self.executor.meter
        meter.num_draft_tokens, meter.governor_reason = k, reason
        return k

    def _round(self, history: list[int], num_draft: int, sampler: Sampler) -> list[int]:
        """One target pass, with a draft before it where `num_draft` is above 0."""
        meter, recorder = self.executor.meter, self.executor.recorder
        sampler.mark()
        before = _round_figures(meter)
        drafted = []
        if num_draft > 0:
            drafted = self.draft_stage.run(history, num_draft, sampler, self._end_ids)
        started = time.perf_counter()
        candidates = [history[-1], *(d.token for d in drafted)]
        phase = Phase.VERIFY if drafted else Phase.DECODE
        logits = self.passes.forward(candidates, phase, num_logits=len(candidates))
        sampling_since = time.perf_counter()
        num_accepted, following = sampler.accept(history, drafted, logits)
        meter.sample_s += time.perf_counter() - sampling_since
        self.state.rollback(len(drafted) - num_accepted)
        self._num_verified = self.state.num_cached
        meter.verify_s += time.perf_counter() - started
        if drafted:
            meter.num_rounds += 1
            meter.num_accepted += num_accepted
        self.executor.end_pass(num_accepted + 1)
        if recorder is not None:
            recorder.end_round(
                TracedRound(
                    num_drafted=len(drafted),
                    num_accepted=num_accepted,
                    draft_s=meter.draft_s - before[0],
                    verify_s=meter.verify_s - before[1],
                    stall_s=meter.decode.stall_s - before[2],
                )
            )
        self._observe_round(len(drafted), num_accepted, before)
        self._tell_fallbacks()
        return [*(d.token for d in drafted[:num_accepted]), following]

    def _observe_round(
        self, num_draft: int, num_accepted: int, before: tuple[float, float, float, int]
    ) -> None:
        if self.governor is None and self.on_round is None:
            return
        draft_s, verify_s, stall_s, num_records = before
        now = _round_figures(self.executor.meter)
        observation = RoundObservation(
            num_draft=num_draft,
            num_accepted=num_accepted,
            draft_s=now[0] - draft_s,
            verify_s=now[1] - verify_s,
            stall_s=now[2] - stall_s,
            num_records=now[3] - num_records,
        )
        if self.governor is not None:
            self.governor.observe(observation)
        if self.on_round is not None:
            self.on_round(observation)

    # -- several at once -------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig | Sequence[SamplingConfig],
    ) -> Iterator[BatchEvent]:
        """Answers up to 32 prompts together, each as `reply` would alone.

        The batch takes the room of the conversation's cache: the next reply reads its chat
        again. `stats` gives the figures of all requests together. `cancel` ends them all.

        Args:
            prompts: Token lists.
            sampling: For all, or one for each.

        Returns:
            An iterator over each request's tokens as they come, and its result at its end.

        Raises:
            ConfigError: No prompt, more than 32, or not one sampling for each.
            ContextLengthError: A prompt does not fit the context.
            BudgetError: The plan has no memory for so many tokens.
        """
        requests = make_requests(prompts, sampling, self.context_length)
        if not can_pad(self.model.config, max(request.max_tokens for request in requests)):
            self._tell_once(
                "batch-in-turn",
                f"{self.model.config.model_type} models answer one request after another: their "
                "cache, or their positions at this length, cannot be shared by a batch.",
            )
            return in_turn(requests, self._finish)
        if self.config.gpu is not None:
            self._tell_once("batch-in-turn", "On a card requests are answered one after another.")
            return in_turn(requests, self._finish)
        is_seeded = any(self._is_seed_at_stake(request.sampling) for request in requests)
        decoder = BatchDecoder(
            requests,
            self.model.config,
            self.plan,
            num_draft_tokens=0 if is_seeded else self._first_depth,
            context_length=self.context_length,
            passes=self.passes,
            executor=self.executor,
            end_ids=self._end_ids,
            chunk_tokens=self.config.prefill_chunk_tokens,
            window=self.draft_stage.window,
            on_round=self._tell_fallbacks,
        )
        self.take_compiled()
        self.state.reset()
        self._num_verified = 0
        self.executor.meter = ReplyMeter()
        return self._together(decoder, requests)

    def _finish(self, request: Request) -> Iterator[int | tuple[int, int]]:
        """Answers a request alone, or what is left of it."""
        return self.reply(request.prompt, request.sampling, ReplySoFar.of_request(request))

    def _together(
        self, decoder: BatchDecoder, requests: Sequence[Request]
    ) -> Generator[BatchEvent, None, None]:
        """Answers requests in one batch; where memory runs out, one after another."""
        try:
            return (yield from decoder.run())
        except Exception as error:
            if as_shortage(error, "in a batch") is None:
                raise
        del decoder  # Its cache; that of one conversation was planned.
        self._free_temporaries()
        self._tell_once(
            "batch-in-turn",
            "Memory ran out in a batch: its requests go on one after another.",
        )
        yield from in_turn([r for r in requests if r.reason is None], self._finish)

    def beam_search(
        self, prompt: Sequence[int], *, num_beams: int, max_new_tokens: int
    ) -> BeamResult:
        """Searches with transformers' own beams; the conversation keeps its state.

        Raises:
            ConfigError: A width below 1 or above 32, or a card computes.
            ContextLengthError: Prompt and answer do not fit the context.
            BudgetError: The plan has no memory for so many beams.
            MemoryShortageError: Memory ran out twice, the second time with small passes.
            CancelledError: `cancel` was called.
        """
        if self.config.gpu is not None:
            raise ConfigError.for_field(
                "gpu", self.config.gpu, "Beams are searched on the processor: leave --gpu out."
            )
        self.take_compiled()
        self.executor.meter = ReplyMeter()
        chunk = self.config.prefill_chunk_tokens
        try:
            return self._search(prompt, num_beams, max_new_tokens, chunk)
        except MemoryShortageError:
            self._tell_once(
                "beams-again", "Memory ran out in a beam search: it is begun anew with less."
            )
        self._free_temporaries()
        return self._search(prompt, num_beams, max_new_tokens, smaller_chunk(chunk))

    def _search(
        self, prompt: Sequence[int], num_beams: int, max_new_tokens: int, chunk_tokens: int
    ) -> BeamResult:
        try:
            return beam_search(
                self.model,
                self.passes,
                prompt,
                self.plan,
                num_beams=num_beams,
                max_new_tokens=max_new_tokens,
                end_ids=self._end_ids,
                chunk_tokens=chunk_tokens,
                context_length=self.context_length,
            )
        except Exception as error:
            shortage = as_shortage(error, f"in a search with {num_beams} beams", self.plan)
            if shortage is None:
                raise
        finally:
            self.executor.driver.end_reply()
        self.state.reset()  # The next reply reads its chat again.
        self._free_temporaries()
        shortage.hint = "Close other programs, or give fewer beams."
        raise shortage

    def _tell_fallbacks(self) -> None:
        if self.config.is_direct_io and not self.transfer.is_direct:
            self._tell_once(
                "no-direct-io",
                "The file system does not allow O_DIRECT: records pass through the page cache.",
            )

        driver = self.executor.driver
        if not driver.payoff.is_on:
            self._tell_once("prefetch-off", driver.payoff.reason)
        if not driver.prediction_payoff.is_on:
            reason = driver.prediction_payoff.reason
            self._tell_once("predictions-off", f"Of the predictor heads: {reason}")

    def stats(self) -> ReplyStats:
        """Returns the figures of the running or the last reply."""
        return self.executor.meter.snapshot(
            expert_peak_bytes=self.executor.expert_bytes,
            peak_memory_bytes=self._peak_bytes(),
            planned_memory_bytes=self.plan.total_bytes,
        )

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

    def residency_sample(self, request_id: str) -> ResidencySample:
        """Returns where every expert is, and how busy: counted since the first call."""
        setup, residency = self.cache_setup, self.executor.driver.residency
        return ResidencySample(
            request_id=request_id,
            regions=region_rows(residency, setup.num_layers, setup.num_experts),
            heat=self._count_heat().rows(),
        )

    def _count_heat(self) -> RoutingHeat:
        setup, executor = self.cache_setup, self.executor
        if executor.heat is None:
            executor.heat = RoutingHeat(setup.num_layers, setup.num_experts, setup.top_k)
        return executor.heat

    def close(self) -> None:
        """Stops the readers and what is compiled in the background, gives the memory back."""
        self._closing.close()


def _round_figures(meter: ReplyMeter) -> tuple[float, float, float, int]:
    """Seconds of drafting, of target passes and of stalls, and records, so far."""
    traffic = meter.decode
    return meter.draft_s, meter.verify_s, traffic.stall_s, traffic.num_records


def _open_stores(home: ModelHome, precision: Precision) -> tuple[ExpertStore, ExpertStore]:
    """Opens the target's store and the one that holds the draft's plane."""
    if not home.is_ready(precision):
        raise StoreError(
            f"{home.title} is not prepared in {precision}.",
            hint=f"Run: mira-chat prepare {home.name} --precision {precision}",
        )
    target = ExpertStore.open(home.store_dir(precision))
    if target.format.draft_plane is not None:
        return target, target
    return target, ExpertStore.open(home.store_dir(Precision.INT4))
