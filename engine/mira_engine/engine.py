"""The engine: load a model, stream a reply, cancel, close.

`Engine.stream` is the one loop to read top to bottom. Everything runs in the thread
that calls it, except the disk readers; `cancel` may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import torch
from mira_kernels.weights import Int4Layout

from .checkpoint.store import ExpertStore
from .config import EngineConfig, MemoryAmount, SamplingConfig, format_bytes
from .errors import (
    BudgetError,
    CancelledError,
    ContextLengthError,
    GenerationError,
    MiraError,
    StoreError,
    check_cancelled,
)
from .events import (
    ChatMessage,
    GenerationDone,
    MemoryPlan,
    Notice,
    PromptProgress,
    ReplyStats,
    StatsSample,
    TokenDelta,
)
from .library import ModelHome
from .model.chat import (
    ChatRenderer,
    Detokeniser,
    end_token_ids,
    has_tokenizer,
    load_tokenizer,
)
from .model.experts import stamp
from .model.facts import context_length, gather_facts, longest_context
from .model.kv import StateManager
from .model.linear import DenseSwitch
from .model.loader import load_backbone
from .model.sampling import Sampler
from .policy.budget import plan_memory
from .policy.driver import CacheSetup, ExpertCacheDriver
from .policy.eviction import preferred_eviction
from .runtime.disk import DiskTransfer
from .runtime.draft import DraftStage
from .runtime.executor import ExpertExecutor
from .runtime.native_path import NativePath
from .runtime.passes import ModelPasses
from .runtime.probe import bound_kernel_cache, default_num_threads
from .runtime.slots import DraftArena, SlotArena, SlotBinder, slot_planes
from .runtime.telemetry import MemoryProbe, ReplyMeter
from .runtime.transfer import LinkThrottle
from .trace import TracedRound, TraceHeader, TraceRecorder
from .types import (
    CompileMode,
    ComputeDtype,
    DraftDense,
    ExpertId,
    FinishReason,
    Phase,
    Plane,
    Precision,
)

DEFAULT_BUDGET = MemoryAmount(share=0.75)
"""Budget where nobody chose one. It leaves something to see on a model that would fit."""

_SAMPLE_INTERVAL_S = 0.25

ReplyEvent = PromptProgress | TokenDelta | StatsSample | Notice | GenerationDone
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
    ) -> None:
        self.home = home
        self._cache_dir = cache_dir if config.compile_mode is not CompileMode.OFF else None
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
        self.plan = self._make_plan()
        self._arrange_device()
        if is_cancelled():
            self.close()
            check_cancelled(is_cancelled)
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
    ) -> Engine:
        """Plans, then loads a prepared model.

        Args:
            home: A model that is ready in `config.precision`.
            config: Precision, budget, K and the rest.
            cache_dir: Where native kernels and compiled steps are kept; `None` for none.
            on_notice: Told every fallback, from the calling or a background thread.
            is_cancelled: Asked between the steps of loading.

        Raises:
            CancelledError: `is_cancelled` said so.
            StoreError: The model is not prepared in that precision, or damaged.
            BudgetError: The budget is below what is needed; nothing was loaded.
        """
        return cls(
            home=home,
            config=config,
            cache_dir=cache_dir,
            on_notice=on_notice or (lambda notice: None),
            is_cancelled=is_cancelled,
        )

    # -- loading ---------------------------------------------------------------------------

    def _make_plan(self) -> MemoryPlan:
        facts = gather_facts(
            self.home.backbone_dir, self.config, self._target.format, self._draft_source.format
        )
        self._top_k = facts.top_k
        budget = self.config.budget
        if budget is None:
            budget = DEFAULT_BUDGET
            self._notice(
                "default-budget",
                f"Experts may use {budget} of their INT8 size "
                f"({format_bytes(budget.resolve(facts.reference_bytes))}); --budget changes it.",
            )
        num_draft_tokens = self.config.num_draft_tokens
        if self.config.precision is Precision.INT4:
            num_draft_tokens = 0  # The target is the draft itself.
        plan, note = plan_memory(facts, budget, num_draft_tokens, self.config.draft_dense)
        if note:
            self._notice("speculation-off", note)
        available = psutil.virtual_memory().available
        if plan.total_bytes > available:
            raise BudgetError(
                f"This needs {format_bytes(plan.total_bytes)} of memory, "
                f"{format_bytes(available)} is free: "
                f"{format_bytes(plan.total_bytes - available)} short.",
                hint="Give a smaller --budget or --context, or close other programs.",
            )
        return plan

    def _arrange_device(self) -> None:
        """Loads the backbone, allocates the arenas, and connects model and executor."""
        manifest, config = self._target.manifest, self.config
        folder = self.home.backbone_dir
        check_cancelled(self._is_load_cancelled)
        self.model = load_backbone(folder, config.dtype)
        switch = DenseSwitch()
        check_cancelled(self._is_load_cancelled)
        self._tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
        self._end_ids = end_token_ids(folder, self.model.config, self._tokenizer)
        self.context_length = context_length(self.model.config, config.context_length)
        has_draft = self.plan.num_draft_tokens > 0
        draft = None
        if has_draft:
            assert self._draft_source.format.draft_plane is not None
            draft = DraftArena(
                self._draft_source,
                self._draft_source.format.draft_plane,
                is_cancelled=self._is_load_cancelled,
            )
        slots = SlotArena(
            self.plan.num_slots,
            slot_planes(self._target.format, has_draft=has_draft),
            self._target.format,
        )
        throttle = None
        if config.link.is_emulated:
            throttle = LinkThrottle(
                bytes_per_s=config.link.bytes_per_s, latency_s=config.link.latency_s
            )
            rate = config.link.bytes_per_s
            self._notice(
                "emulated-link",
                f"The link is emulated: {format_bytes(rate) + '/s' if rate else 'own speed'}, "
                f"{1e3 * config.link.latency_s:g} ms latency.",
            )
        self.transfer = DiskTransfer(
            locate=self._locate,
            planes=slots.planes,
            slot_buffers=slots.buffers,
            num_threads=config.num_reader_threads,
            is_direct=config.is_direct_io,
            throttle=throttle,
        )
        self.cache_setup = CacheSetup(
            num_layers=manifest.num_layers,
            num_experts=manifest.num_experts,
            num_slots=self.plan.num_slots,
            eviction=config.eviction or preferred_eviction(self.plan.num_draft_tokens),
            num_reserved_slots=min(2, self.plan.num_slots - 1),
        )
        bind = SlotBinder(self._target.format, slots, draft)
        self.executor = ExpertExecutor(
            driver=ExpertCacheDriver(self.cache_setup),
            transfer=self.transfer,
            bind=bind,
            draft=draft,
        )
        self.executor.is_cancelled = self._cancelled.is_set
        if config.trace_path is not None:
            self.executor.recorder = TraceRecorder(self._trace_header())
        num_stamped = stamp(self.model, self.executor)
        if num_stamped != manifest.num_layers:
            raise StoreError(
                f"The store has {manifest.num_layers} MoE layers, the model {num_stamped}.",
                hint="Remove the model and prepare it again.",
            )
        self.state = StateManager(
            self.model, capacity=self.context_length, is_rollback_wanted=has_draft
        )
        self._num_verified = 0
        """Cached tokens whose state the target made; a draft in progress adds others."""
        self.passes = ModelPasses(self.model, self.executor, self.state, switch)
        self._tell_load_fallbacks()
        self.draft_stage = DraftStage(
            self.passes,
            self.executor,
            is_prefetch_enabled=config.is_prefetch_enabled,
        )
        self.native_path: NativePath | None = None
        if self._cache_dir is not None:
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
                slots=slots,
                bind=bind,
                on_notice=self._notice,
            )
            self.native_path.start(self._is_load_cancelled)

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

    def take_compiled(self) -> None:
        """Takes up what the background has compiled. Between replies only.

        The first time it can take a second. Every reply begins with it; to call it when a
        reply has ended spares the next one that second.
        """
        if self.native_path is not None:
            self.native_path.take()

    def _tell_load_fallbacks(self) -> None:
        """Says what is slower or less exact here than it could be."""
        has_draft = self.executor.draft is not None
        fmt = self._draft_source.format if has_draft else self._target.format
        is_unpacked = fmt.group_size is not None and (
            fmt.layout == Int4Layout.ROWS or not fmt.is_native
        )
        if is_unpacked and self.config.dtype is ComputeDtype.BFLOAT16:
            self._notice(
                "unpacked-experts",
                "INT4 experts are unpacked for every use: this processor has no packed kernel "
                "for them, or their sizes do not fit it.",
            )
        wanted = self.config.draft_dense
        if (
            has_draft
            and wanted in (DraftDense.SPLIT, DraftDense.INT8)
            and (self.plan.draft_dense is not wanted)
        ):
            self._notice(
                "draft-dense",
                f"The draft multiplies as the target does, not by {wanted}: that takes bfloat16 "
                "and compiled steps.",
            )
        if not self._probe.is_exact:
            self._notice(
                "sampled-memory", "Peak memory is sampled here: a short peak can be missed."
            )

    def _locate(self, expert: ExpertId, plane: Plane) -> tuple[Path, int, int]:
        return self._target.record_location(expert.layer, plane, expert.expert)

    def _tell_once(self, code: str, text: str) -> None:
        if code not in self._told:
            self._told.add(code)
            self._notice(code, text)

    def _notice(self, code: str, text: str) -> None:
        self._notify(Notice(code=code, text=text))

    # -- replies ---------------------------------------------------------------------------

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns a chat's tokens, ready for the assistant's turn."""
        if self._tokenizer is None:
            raise GenerationError("The model has no tokenizer.", hint="Download it whole.")
        return ChatRenderer(self._tokenizer).render(messages)

    def cancel(self) -> None:
        """Stops the running reply at the next layer or draft step. Any thread."""
        self._cancelled.set()

    def clear_cancel(self) -> None:
        """Allows the next reply. Called before a reply is asked for, not inside it."""
        self._cancelled.clear()

    def stream(
        self, request_id: str, messages: Sequence[ChatMessage], sampling: SamplingConfig
    ) -> Iterator[ReplyEvent]:
        """Answers a chat.

        Yields:
            Prompt progress, text deltas, figures at most four times a second, and at
            the end `GenerationDone`, also when it was cancelled.

        Raises:
            ContextLengthError: The chat does not fit the context; nothing is trimmed.
            NonFiniteError: nan in the logits.
            StoreError: A record cannot be read.
        """
        prompt = self.render(messages)
        assert self._tokenizer is not None
        detokeniser = Detokeniser(self._tokenizer)
        text: list[str] = []
        reply = self.reply(prompt, sampling)
        next_sample = time.perf_counter() + _SAMPLE_INTERVAL_S
        reason = FinishReason.STOP
        while True:
            try:
                step = next(reply)
            except StopIteration as stop:
                reason = stop.value
                break
            if isinstance(step, int):
                piece = "" if step in self._end_ids else detokeniser.push(step)
                text.append(piece)
                yield TokenDelta(request_id=request_id, text=piece, num_tokens=1)
            else:
                yield PromptProgress(request_id=request_id, done=step[0], total=step[1])
            if time.perf_counter() >= next_sample:
                next_sample = time.perf_counter() + _SAMPLE_INTERVAL_S
                yield StatsSample(request_id=request_id, stats=self.stats())
        rest = detokeniser.flush()
        if rest:
            text.append(rest)
            yield TokenDelta(request_id=request_id, text=rest, num_tokens=0)
        yield GenerationDone(
            request_id=request_id, text="".join(text), reason=reason, stats=self.stats()
        )

    def reply(
        self, prompt: Sequence[int], sampling: SamplingConfig
    ) -> Iterator[int | tuple[int, int]]:
        """Generates tokens after `prompt`; the one loop.

        Yields:
            `(done, total)` while the prompt is read, then each new token, the end of
            text included.

        Returns:
            Why it ended.
        """
        self.take_compiled()
        meter = self.executor.meter = ReplyMeter()
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"The chat has {len(prompt)} tokens, the context holds {self.context_length}.",
                hint="Shorten the prompt, start a new chat, or give a larger --context "
                f"(this model reads up to {longest_context(self.model.config)} tokens).",
            )
        limit = min(room, sampling.max_new_tokens or room)
        sampler = Sampler(sampling)
        meter.num_prompt_tokens = len(prompt)
        meter.num_cached_tokens = self.state.reuse_prefix(prompt)
        recorder = self.executor.recorder
        if recorder is not None:
            recorder.start_reply(len(prompt))
        history = list(prompt)
        self._num_verified = self.state.num_cached
        try:
            yield from self._read_prompt(history, sampler)
            meter.on_token()
            yield history[-1]
            while history[-1] not in self._end_ids:
                made = len(history) - len(prompt)
                if made >= limit:
                    return FinishReason.CONTEXT if limit == room else FinishReason.LENGTH
                num_draft = min(self._num_draft_tokens(), limit - made - 1)
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
        except MiraError:
            self.state.reset()  # What it holds may be the cause, nan for example.
            raise
        finally:
            self.executor.driver.end_reply()
            if recorder is not None and self.config.trace_path is not None:
                recorder.write(Path(self.config.trace_path))

    def _read_prompt(self, history: list[int], sampler: Sampler) -> Iterator[tuple[int, int]]:
        """Prefills what is not cached and appends the first new token to `history`."""
        total, chunk = len(history), self.config.prefill_chunk_tokens
        logits = None
        while self.state.num_cached < total:
            start = self.state.num_cached
            size = self.state.max_pass_tokens(chunk)
            if size < chunk:
                self._tell_once(
                    "prompt-by-token",
                    f"{self.model.config.model_type} models read what follows the first "
                    f"{chunk} tokens one token at a time.",
                )
            logits = self.passes.forward(history[start : start + size], Phase.PREFILL)
            self.state.rollback(0)
            self._num_verified = self.state.num_cached
            yield (self.state.num_cached, total)
        assert logits is not None
        history.append(sampler.draw(history, logits[-1]).token)

    def _num_draft_tokens(self) -> int:
        """K in force: the plan's, or 0 where this model's cache cannot be rolled back."""
        k = self.plan.num_draft_tokens
        if k and not self.state.can_roll_back:
            self._tell_once(
                "speculation-off",
                f"Speculation is off: the cache of {self.model.config.model_type} models "
                "keeps a running state that cannot be rolled back.",
            )
            return 0
        return k

    def _round(self, history: list[int], num_draft: int, sampler: Sampler) -> list[int]:
        """One target pass, with a draft before it where `num_draft` is above 0."""
        meter, recorder = self.executor.meter, self.executor.recorder
        before = (meter.draft_s, meter.verify_s, meter.decode.stall_s)
        drafted = []
        if num_draft > 0:
            drafted = self.draft_stage.run(history, num_draft, sampler, self._end_ids)
        started = time.perf_counter()
        candidates = [history[-1], *(d.token for d in drafted)]
        phase = Phase.VERIFY if drafted else Phase.DECODE
        logits = self.passes.forward(candidates, phase, num_logits=len(candidates))
        num_accepted, following = sampler.accept(history, drafted, logits)
        self.state.rollback(len(drafted) - num_accepted)
        self._num_verified = self.state.num_cached
        self.executor.driver.end_pass()
        meter.verify_s += time.perf_counter() - started
        if drafted:
            meter.num_rounds += 1
            meter.num_accepted += num_accepted
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
        self._tell_fallbacks()
        return [*(d.token for d in drafted[:num_accepted]), following]

    def _tell_fallbacks(self) -> None:
        if self.config.is_direct_io and not self.transfer.is_direct:
            self._tell_once(
                "no-direct-io",
                "The file system does not allow O_DIRECT: records pass through the page cache.",
            )

    def stats(self) -> ReplyStats:
        """Returns the figures of the running or the last reply."""
        return self.executor.meter.snapshot(
            expert_peak_bytes=self.executor.expert_bytes,
            peak_memory_bytes=self._probe.peak_bytes(),
            planned_memory_bytes=self.plan.total_bytes,
        )

    def close(self) -> None:
        """Stops the readers and what is compiled in the background, gives the memory back."""
        if self.native_path is not None:
            self.native_path.close()
        self.transfer.close()


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
