"""Which K is fastest here: a sweep over speculation depths on real replies.

Loads the model once for each K and repetition, so that every K is measured as the chat
would run it: with its own plan, eviction and compiled steps. Repetitions are the outer
loop, so that a machine that slows down slows all K alike. The result is saved in the
model's home, and `Engine.load` takes it where nobody gave K. Where memory runs out, the
sweep goes on once with less; a profile holds for one budget. Runs in the engine process,
in the thread that asked.

Source: Specter, selection of K: acceptance, E[A] = a / (1 - a), and a sweep by mean
end-to-end TPOT over 25 prompts, three times.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from .config import EngineConfig, MemoryAmount, SamplingConfig, format_bytes
from .engine import Engine
from .errors import (
    BudgetError,
    CancelledError,
    GenerationError,
    MemoryShortageError,
    MiraError,
)
from .events import ChatMessage, DepthResult, KProfile, Notice
from .library import ModelHome
from .memory_retry import SHRUNK, less_for_experts, once_more
from .policy.speculation import RoundObservation
from .profiles import load_profile, save_profile
from .runtime.shortage import is_long_pass, shortage_of, smaller_chunk
from .types import CompileMode, FinishReason, Precision

PROMPTS_FILE = "profile_prompts.json"

_WHAT = "while a K was measured"

_STEP_BYTES = 2**20
"""Budgets after a shortage are whole multiples, so that `--budget` can name them."""

OnProgress = Callable[[int, int, str], None]
"""Called with replies done, replies in all, and what runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How much is measured.

    Attributes:
        depths: K's to try, 0 among them.
        num_prompts_per_kind: Of each of the five kinds of text.
        num_repeats: How often all of it is run.
        num_tokens: Most tokens of a reply.
    """

    depths: tuple[int, ...]
    num_prompts_per_kind: int
    num_repeats: int
    num_tokens: int


FULL_SWEEP = Sweep(
    depths=(0, 2, 4, 6, 8, 12, 16, 20, 24, 32),
    num_prompts_per_kind=5,
    num_repeats=3,
    num_tokens=64,
)
QUICK_SWEEP = Sweep(depths=(0, 2, 4, 8), num_prompts_per_kind=1, num_repeats=1, num_tokens=24)


def load_prompts(num_per_kind: int) -> list[str]:
    """Returns the first prompts of each kind of text, kind by kind."""
    text = resources.files("mira_assets").joinpath(PROMPTS_FILE).read_text(encoding="utf-8")
    kinds: dict[str, list[str]] = json.loads(text)
    return [prompt for prompts in kinds.values() for prompt in prompts[:num_per_kind]]


def profile_model(
    home: ModelHome,
    config: EngineConfig,
    sweep: Sweep,
    *,
    cache_dir: Path | None,
    on_progress: OnProgress,
    on_notice: Callable[[Notice], None],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> KProfile:
    """Measures every K of the sweep and saves what was found.

    Args:
        home: A model that is ready in `config.precision`.
        config: How it is loaded; its K is left aside. Steps are compiled before they are
            measured, unless compiling is off.
        sweep: How much is measured.
        cache_dir: Native kernels and compiled steps; `None` for none.
        on_progress: Called before every reply, in this thread.
        on_notice: Told every fallback once.
        is_cancelled: Asked in every layer.

    Raises:
        CancelledError: `is_cancelled` said so; nothing is saved of the budget in force.
        BudgetError: The budget is too small even for K = 0.
        MemoryShortageError: Memory ran out twice; likewise.
        GenerationError: No reply had a second token.
    """
    if config.compile_mode is CompileMode.AUTO:
        config = replace(config, compile_mode=CompileMode.WAIT)
    told: set[str] = set()

    def tell(notice: Notice) -> None:
        if notice.code not in told:
            told.add(notice.code)
            on_notice(notice)

    run = _SweepRun(home, config, sweep, cache_dir, on_progress, tell, is_cancelled)
    once_more(run.measure_all, run.take_less, what=_WHAT)
    profile = run.result()
    run.save(profile)
    return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One K in one round: seconds per new token of each reply, and how its drafts fared."""

    tpots_s: tuple[float, ...]
    num_accepted: int
    num_judged: int


def _least_replies(profile: KProfile) -> int:
    return min((result.num_replies for result in profile.results), default=0)


class _SweepRun:
    """The replies of one sweep, and what they add up to.

    All of its figures are of one budget: where memory makes it go on with another, what was
    measured before is not of this profile any more.
    """

    def __init__(
        self,
        home: ModelHome,
        config: EngineConfig,
        sweep: Sweep,
        cache_dir: Path | None,
        on_progress: OnProgress,
        tell: Callable[[Notice], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._home, self._config, self._sweep = home, config, sweep
        self._cache_dir, self._is_cancelled = cache_dir, is_cancelled
        self._on_progress, self._tell = on_progress, tell
        self._prompts = load_prompts(sweep.num_prompts_per_kind)
        self._depths = self._all_depths()
        self._chunk_tokens = config.prefill_chunk_tokens
        self._measured: dict[tuple[int, int], _Measured] = {}
        """By round and K."""
        self._num_accepted = self._num_judged = 0

    def _all_depths(self) -> tuple[int, ...]:
        return (0,) if self._config.precision is Precision.INT4 else self._sweep.depths

    def measure_all(self) -> None:
        """Measures what was not yet, round by round, every K in each.

        Raises:
            CancelledError: Somebody asked to stop.
            BudgetError: The budget is too small even for K = 0.
            MemoryShortageError: Memory ran out; what was measured before that K is kept.
        """
        for repeat in range(self._sweep.num_repeats):
            for k in self._depths:
                if (repeat, k) in self._measured:
                    continue
                try:
                    self._measure(k, repeat)
                except MemoryShortageError:
                    raise
                except BudgetError as error:
                    if k == 0:
                        raise
                    text = f"Only K = 0 is measured: {error.message}"
                    self._tell(Notice(code="profile-k0", text=text))
                    self._depths = (0,)
                    break

    def _measure(self, k: int, repeat: int) -> None:
        """Loads the model with this K and answers all prompts."""
        num_before = len(self._measured) * len(self._prompts)
        total = len(self._depths) * len(self._prompts) * self._sweep.num_repeats
        detail = f"K {k}"
        if self._sweep.num_repeats > 1:
            detail += f", round {repeat + 1} of {self._sweep.num_repeats}"
        self._on_progress(num_before, total, f"{detail}, loading")
        engine = self._load(k)
        self._num_accepted = self._num_judged = 0
        tpots_s: list[float] = []
        try:
            self._answer(engine, self._prompts[0])  # Fills the slots; not measured.
            engine.on_round = self._count
            for number, prompt in enumerate(self._prompts):
                self._on_progress(num_before + number, total, detail)
                tpot_s = self._answer(engine, prompt)
                if tpot_s is not None:
                    tpots_s.append(tpot_s)
            self._on_progress(num_before + len(self._prompts), total, detail)
        except Exception as error:
            shortage = shortage_of(error, _WHAT, engine.plan)
            if shortage is None:
                raise
        else:
            shortage = None
        finally:
            engine.close()
        if shortage is not None:
            raise shortage
        self._measured[repeat, k] = _Measured(
            tpots_s=tuple(tpots_s), num_accepted=self._num_accepted, num_judged=self._num_judged
        )

    def _load(self, k: int) -> Engine:
        engine = Engine.load(
            self._home,
            replace(self._config, num_draft_tokens=k),
            cache_dir=self._cache_dir,
            on_notice=self._tell,
            is_cancelled=self._is_cancelled,
        )
        engine.executor.is_cancelled = self._is_cancelled
        engine.limit_chunks(self._chunk_tokens)
        self.profile_key = engine.profile_key
        if self._config.budget is None and self._config.memory_bytes is None:
            # The usual budget follows the free memory, which other loads would find otherwise.
            budget = MemoryAmount(num_bytes=engine.profile_key.budget_bytes)
            self._config = replace(self._config, budget=budget)
        return engine

    def _answer(self, engine: Engine, prompt: str) -> float | None:
        """Answers a prompt. Returns its TPOT in seconds, `None` below two tokens."""
        engine.state.reset()
        tokens = engine.render([ChatMessage(role="user", content=prompt)])
        reply = engine.reply(tokens, SamplingConfig(max_new_tokens=self._sweep.num_tokens))
        reason = FinishReason.STOP
        while True:
            try:
                next(reply)
            except StopIteration as stop:
                reason = stop.value
                break
        if reason is FinishReason.CANCELLED:
            raise CancelledError("Profiling was stopped.")
        stats = engine.stats()
        return 1 / stats.tokens_per_s if stats.tokens_per_s else None

    def _count(self, observation: RoundObservation) -> None:
        accepted, drafted = observation.num_accepted, observation.num_draft
        self._num_accepted += accepted
        self._num_judged += accepted + (accepted < drafted)

    def take_less(self, shortage: MemoryShortageError) -> str:
        """Lets the rest take less memory after a shortage. Returns what, in words.

        Shorter passes over prompts change no figure, so all that was measured stays. Another
        budget changes all of them: rounds that are whole are saved as the profile of the
        former one, and everything is measured anew.

        Raises:
            MemoryShortageError: The given one, where nothing was planned yet.
        """
        if is_long_pass(shortage.num_prompt_tokens, self._chunk_tokens):
            self._chunk_tokens = smaller_chunk(shortage.num_prompt_tokens)
            text = (
                f"Memory ran out over {shortage.num_prompt_tokens} prompt tokens read at once: "
                f"from now on {self._chunk_tokens} are. What was measured stays."
            )
            self._tell(Notice(code=SHRUNK, text=text))
            return f"prompts read {self._chunk_tokens} tokens at once"
        less, change = less_for_experts(self._config, shortage)
        text = f"{shortage.message.removesuffix('.')}: {change}, and every K is measured anew."
        kept = self._keep_whole_rounds()
        if less > _STEP_BYTES:
            less -= less % _STEP_BYTES
            text += f" The profile holds for --budget {less // _STEP_BYTES}MiB."
        self._tell(Notice(code=SHRUNK, text=text + kept))
        self._measured.clear()
        self._depths = self._all_depths()
        self._config = replace(self._config, budget=MemoryAmount(num_bytes=less))
        return f"{format_bytes(less)} for experts"

    def _keep_whole_rounds(self) -> str:
        """Saves the profile of the rounds in which every K was measured. Returns words on it."""
        whole = [
            repeat
            for repeat in range(self._sweep.num_repeats)
            if all((repeat, k) in self._measured for k in self._depths)
        ]
        if not whole:
            return ""
        former = load_profile(self._home.root, self.profile_key, lambda code, text: None)
        if former is not None and _least_replies(former) >= len(whole) * len(self._prompts):
            return " The former budget's profile stays as it was."
        self._measured = {key: each for key, each in self._measured.items() if key[0] in whole}
        try:
            self.save(self.result())
        except MiraError as error:
            return f" What was measured before is not kept: {error.message}"
        return " What was measured before in whole rounds is kept for the former budget."

    def save(self, profile: KProfile) -> None:
        """Writes the profile of the budget in force.

        Raises:
            PrepareError: The file cannot be written.
        """
        save_profile(self._home.root, self.profile_key, profile)

    def result(self) -> KProfile:
        """Returns the profile of what was measured.

        Raises:
            GenerationError: No reply had a second token.
        """
        tpots_s: dict[int, list[float]] = {}
        for (_, k), each in sorted(self._measured.items()):
            if each.tpots_s:
                tpots_s.setdefault(k, []).extend(each.tpots_s)
        results = tuple(
            DepthResult(num_draft_tokens=k, tpot_s=sum(tpots) / len(tpots), num_replies=len(tpots))
            for k, tpots in sorted(tpots_s.items())
        )
        if not results:
            raise GenerationError(
                "No reply had two tokens, so nothing can be measured.",
                hint="This model ends its replies at once; give -k by hand.",
            )
        best = min(results, key=lambda each: (each.tpot_s, each.num_draft_tokens))
        num_judged = sum(each.num_judged for each in self._measured.values())
        num_accepted = sum(each.num_accepted for each in self._measured.values())
        acceptance = num_accepted / num_judged if num_judged else 0.0
        return KProfile(best=best.num_draft_tokens, acceptance=acceptance, results=results)
