"""What is done where memory runs out: it is given back, less is asked for, once, and it is said.

Loading is tried a second time with less memory for experts. A reply goes on after what was
told: where a prompt's pass failed it is read in smaller ones, else the model is loaded anew
with less for experts. The same way a reply in float16 goes on in float32 once a number has
grown too large. A second shortage is an error; nothing here is tried for ever.

Two engines never exist at once, so nobody here may hold on to one while another is loaded:
neither in a local name nor through the traceback of an error.

Runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from .config import EngineConfig, MemoryAmount, SamplingConfig, format_bytes
from .engine import Engine
from .errors import BudgetError, CancelledError, MemoryShortageError, MiraError, NonFiniteError
from .events import MemoryPlan, Notice, ReplyStats, ResidencySample
from .library import ModelHome
from .load_plan import OnNotice
from .runtime import gpu_device
from .runtime.reply_so_far import ReplySoFar
from .runtime.shortage import LEAST_CHUNK, give_memory_back, smaller_chunk
from .system_memory import system_memory
from .types import ComputeDtype, FinishReason

LEAST_SHRINKAGE = 0.1
"""Share of the experts' memory that is given up at least: what was missing at the failure may
be free again when it is measured."""

SHRUNK = "memory-shrunk"
"""Code of the notices that say from how much to how much."""

WIDENED = "float32"
"""Code of the notice that a model has gone over from float16."""

_HINT = "Close other programs, or give a smaller --budget, --memory or --context."

Reload = Callable[[Callable[[], EngineConfig]], None]
"""Gives the engine up, then asks for a configuration and loads it; where that fails loads the
former one, and raises what failed."""


def free_bytes(config: EngineConfig) -> int:
    """Returns the memory that nobody uses now, of the device that a configuration names."""
    if config.gpu is not None:
        return gpu_device.free_device_bytes(config.gpu)
    return system_memory().available_bytes


def smaller_budget(*, budget_bytes: int, planned_bytes: int, free_bytes: int) -> int:
    """Returns the memory for experts after a shortage, at least one byte.

    Args:
        budget_bytes: Their memory at the shortage.
        planned_bytes: All that was planned then.
        free_bytes: What is free once all of that was given back.
    """
    missing = max(planned_bytes - free_bytes, int(LEAST_SHRINKAGE * budget_bytes) + 1)
    return max(1, budget_bytes - missing)


def load_with_retry(
    home: ModelHome,
    config: EngineConfig,
    *,
    cache_dir: Path | None = None,
    on_notice: OnNotice = lambda notice: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Engine:
    """Loads a model as `Engine.load`; where memory runs out, once more with less for experts.

    Raises:
        MemoryShortageError: Memory ran out twice, or what there is would be too little.
    """
    load = partial(
        Engine.load, home, cache_dir=cache_dir, on_notice=on_notice, is_cancelled=is_cancelled
    )
    try:
        return load(config)
    except MemoryShortageError as error:
        if not error.planned_bytes:
            raise
        budget_bytes, planned_bytes = error.budget_bytes, error.planned_bytes
    give_memory_back()  # The error is gone, and with it the last hold on what was begun.
    less = smaller_budget(
        budget_bytes=budget_bytes, planned_bytes=planned_bytes, free_bytes=free_bytes(config)
    )
    text = f"Memory ran out while the model was loaded: {_from_to(budget_bytes, less)}."
    on_notice(Notice(code=SHRUNK, text=text))
    try:
        return load(replace(config, budget=MemoryAmount(num_bytes=less)))
    except BudgetError as error:
        why = _reason(error)
    give_memory_back()
    raise MemoryShortageError(
        f"Memory ran out while the model was loaded, and {format_bytes(less)} for experts did "
        f"not help{why}",
        hint=_HINT,
    )


def _reason(error: BudgetError) -> str:
    """What an error adds to the words that memory ran out; a full stop where nothing."""
    return "." if isinstance(error, MemoryShortageError) else f": {error.message}"


def _from_to(before_bytes: int, after_bytes: int) -> str:
    return f"experts get {format_bytes(after_bytes)} instead of {format_bytes(before_bytes)}"


class LastingReplies:
    """Makes the tokens of replies with whichever engine is loaded, one or two for each.

    Args:
        current: Returns the engine that is loaded.
        reload: Puts another one in its place.
        on_notice: Told what was given up.
    """

    def __init__(self, current: Callable[[], Engine], reload: Reload, on_notice: OnNotice) -> None:
        self._current = current
        self._reload = reload
        self._notify = on_notice

    @property
    def context_length(self) -> int:
        """Tokens of prompt and reply together."""
        return self._current().context_length

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end a reply."""
        return self._current().end_ids

    @property
    def longest_context(self) -> int:
        """Most tokens that the model can read."""
        return self._current().longest_context

    def stats(self) -> ReplyStats:
        """Returns the figures so far, of all engines together."""
        return self._current().stats()

    def residency_sample(self, request_id: str) -> ResidencySample:
        """Returns where every expert is, and how busy."""
        return self._current().residency_sample(request_id)

    def reply(
        self, prompt: Sequence[int], sampling: SamplingConfig
    ) -> Generator[int | tuple[int, int], None, FinishReason]:
        """Generates tokens after `prompt`; see `Engine.reply`.

        Raises:
            MemoryShortageError: Memory ran out twice, or there is too little for a second try.
        """
        self._current().take_compiled()
        so_far = ReplySoFar(prompt, sampling)
        is_shrunk = False
        while True:
            try:
                return (yield from self._current().reply(prompt, sampling, so_far))
            except MemoryShortageError as error:
                if is_shrunk:
                    raise MemoryShortageError(
                        "Memory ran out in a reply, and once more with less.", hint=_HINT
                    ) from error
                is_shrunk = True
                give_way = partial(self._shrink, error.num_prompt_tokens)
            except NonFiniteError:
                if self._current().config.dtype is not ComputeDtype.FLOAT16:
                    raise
                give_way = self._widen
            try:
                give_way()
            except CancelledError:
                self._current().executor.meter = so_far.meter
                return FinishReason.CANCELLED

    def _shrink(self, num_prompt_tokens: int) -> None:
        """Takes less memory from now on, by what failed.

        Args:
            num_prompt_tokens: Of the pass that did, 0 where it was not one over a prompt.
        """
        # A short pass that fails is not what takes the memory.
        is_long = 2 * num_prompt_tokens >= self._current().config.prefill_chunk_tokens
        if is_long and num_prompt_tokens > LEAST_CHUNK:
            less = smaller_chunk(num_prompt_tokens)
            self._current().limit_chunks(less)
            self._tell(
                SHRUNK,
                f"Memory ran out over {num_prompt_tokens} prompt tokens read at once: from now on "
                f"{less} are.",
            )
            return
        config, plan = self._current().config, self._current().plan
        try:
            self._reload(partial(self._less_for_experts, config, plan))
        except BudgetError as error:
            raise MemoryShortageError(
                "Memory ran out in a reply, and loading the model with less did not help"
                f"{_reason(error)}{self._what_is_left()}",
                hint=_HINT,
            ) from None

    def _less_for_experts(self, config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
        """Returns what to load after a shortage; asked once the memory was given back."""
        less = smaller_budget(
            budget_bytes=plan.budget_bytes,
            planned_bytes=plan.total_bytes,
            free_bytes=free_bytes(config),
        )
        change = _from_to(plan.budget_bytes, less)
        self._tell(SHRUNK, f"Memory ran out in a reply: {change}, and the reply goes on.")
        return replace(config, budget=MemoryAmount(num_bytes=less))

    def _what_is_left(self) -> str:
        try:
            self._current()
        except MiraError:
            return " No model is loaded any more."
        return ""

    def _widen(self) -> None:
        """Goes over to float32, which takes twice the memory for what is no expert."""
        config, plan = self._current().config, self._current().plan

        try:
            self._reload(partial(self._in_float32, config, plan))
        except BudgetError as error:
            raise NonFiniteError(
                "A number grew too large for float16, and there is no memory for float32: "
                f"{error.message}",
                hint=_HINT,
            ) from None

    def _in_float32(self, config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
        """Returns what to load after an overflow; asked once the memory was given back."""
        room = free_bytes(config)
        if config.memory_bytes is not None:
            room = min(room, config.memory_bytes)
        needed = plan.total_bytes + plan.non_expert_bytes + plan.kv_bytes
        budget = max(1, plan.budget_bytes - max(0, needed - room))
        text = "A number grew too large for float16: the reply goes on in float32"
        if budget < plan.budget_bytes:
            text += f", for which {_from_to(plan.budget_bytes, budget)}"
        self._tell(WIDENED, f"{text}. The model is loaded anew.")
        return replace(config, dtype=ComputeDtype.FLOAT32, budget=MemoryAmount(num_bytes=budget))

    def _tell(self, code: str, text: str) -> None:
        self._notify(Notice(code=code, text=text))
