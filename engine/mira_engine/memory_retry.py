"""What is done where memory runs out: it is given back, less is asked for, once, and it is said.

Work that can be done again is (`once_more`): a model is loaded with less memory for experts,
and whoever measures, records or trains says what less is there. A reply goes on after what was
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
from typing import TypeVar

from .config import EngineConfig, MemoryAmount, SamplingConfig, format_bytes
from .engine import Engine
from .errors import BudgetError, CancelledError, MemoryShortageError, MiraError, NonFiniteError
from .events import MemoryPlan, Notice, ReplyStats, ResidencySample
from .library import ModelHome
from .load_plan import OnNotice
from .reconfiguring import what_goes_on
from .runtime import gpu_device
from .runtime.reply_so_far import ReplySoFar
from .runtime.shortage import give_memory_back, is_long_pass, shortage_of, smaller_chunk
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

WHILE_LOADING = "while the model was loaded"

Result = TypeVar("Result")

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

    def take_less(shortage: MemoryShortageError) -> str:
        nonlocal config
        less, change = less_for_experts(config, shortage)
        on_notice(Notice(code=SHRUNK, text=f"{shortage.message.removesuffix('.')}: {change}."))
        config = replace(config, budget=MemoryAmount(num_bytes=less))
        return f"{format_bytes(less)} for experts"

    return once_more(lambda: load(config), take_less, what=WHILE_LOADING)


def once_more(
    work: Callable[[], Result],
    take_less: Callable[[MemoryShortageError], str],
    *,
    what: str,
    hint: str = _HINT,
) -> Result:
    """Does some work; where memory runs out gives it back, and does it once more with less.

    Args:
        work: Holds on to nothing once it has failed, and goes on with what it has finished.
        take_less: Lets the work take less, now that the memory was given back, and names that:
            "8 prompts at once". Raises what it is told where there is no less.
        what: Completes "Memory ran out": "while the model was loaded".
        hint: What a person can do where that did not help.

    Raises:
        MemoryShortageError: Memory ran out twice, or what there is would be too little.
    """
    try:
        return work()
    except Exception as error:
        shortage = shortage_of(error, what)
        if shortage is None:
            raise
    give_memory_back()  # The error is gone, and with it the last hold on what was begun.
    less = take_less(shortage)
    try:
        return work()
    except Exception as error:
        if not isinstance(error, BudgetError) and shortage_of(error, what) is None:
            raise
        why = _reason(error)
    give_memory_back()
    raise MemoryShortageError(f"Memory ran out {what}, and {less} did not help{why}", hint=hint)


def less_for_experts(config: EngineConfig, shortage: MemoryShortageError) -> tuple[int, str]:
    """Returns the bytes for experts after a shortage, and the change in words.

    Args:
        config: Of the engine that failed; what it held was given back.
        shortage: What it said.

    Raises:
        MemoryShortageError: The given one, where nothing was planned yet that could be less.
    """
    if not shortage.planned_bytes:
        raise shortage
    less = smaller_budget(
        budget_bytes=shortage.budget_bytes,
        planned_bytes=shortage.planned_bytes,
        free_bytes=free_bytes(config),
    )
    return less, _from_to(shortage.budget_bytes, less)


def _reason(error: Exception) -> str:
    """What an error adds to the words that memory ran out; a full stop where nothing."""
    is_more = isinstance(error, BudgetError) and not isinstance(error, MemoryShortageError)
    return f": {error.message}" if is_more else "."


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
        if is_long_pass(num_prompt_tokens, self._current().config.prefill_chunk_tokens):
            less = smaller_chunk(num_prompt_tokens)
            self._current().limit_chunks(less)
            self._tell(
                SHRUNK,
                f"Memory ran out over {num_prompt_tokens} prompt tokens read at once: from now on "
                f"{less} are.",
            )
            return
        self._load_anew(
            self._less_for_experts,
            MemoryShortageError,
            "Memory ran out in a reply, and loading the model with less did not help",
        )

    def _widen(self) -> None:
        """Goes over to float32, which takes twice the memory for what is no expert."""
        self._load_anew(
            self._in_float32,
            NonFiniteError,
            "A number grew too large for float16, and there is no memory for float32",
        )

    def _load_anew(
        self,
        choose: Callable[[EngineConfig, MemoryPlan], EngineConfig],
        kind: type[MiraError],
        failed: str,
    ) -> None:
        """Puts another engine in the place of this one.

        Args:
            choose: Given this one's configuration and plan, returns what to load; asked once
                the memory was given back.
            kind: Raised where there is too little memory for that.
            failed: What it says then.
        """
        config, plan = self._current().config, self._current().plan
        try:
            self._reload(partial(choose, config, plan))
        except BudgetError as error:
            raise kind(f"{failed}{self._reason(error)}", hint=_HINT) from None

    def _less_for_experts(self, config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
        less = smaller_budget(
            budget_bytes=plan.budget_bytes,
            planned_bytes=plan.total_bytes,
            free_bytes=free_bytes(config),
        )
        change = _from_to(plan.budget_bytes, less)
        self._tell(SHRUNK, f"Memory ran out in a reply: {change}, and the reply goes on.")
        return replace(config, budget=MemoryAmount(num_bytes=less))

    def _in_float32(self, config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
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

    def _reason(self, error: BudgetError) -> str:
        """What the error of a reload adds: why it failed, and what is loaded now."""
        reason = _reason(error)
        try:
            self._current()
        except MiraError:
            return f"{reason} No model is loaded any more."
        return reason if error.message in reason else reason + what_goes_on(error)

    def _tell(self, code: str, text: str) -> None:
        self._notify(Notice(code=code, text=text))
