"""Which K is fastest here: a sweep over speculation depths on real replies.

Loads the model once for each K and repetition, so that every K is measured as the chat
would run it: with its own plan, eviction and compiled steps. Repetitions are the outer
loop, so that a machine that slows down slows all K alike. The result is saved in the
model's home, and `Engine.load` takes it where nobody gave K. Runs in the engine process,
in the thread that asked.

Source: Specter, selection of K: acceptance, E[A] = a / (1 - a), and a sweep by mean
end-to-end TPOT over 25 prompts, three times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from .config import EngineConfig, SamplingConfig
from .engine import Engine
from .errors import BudgetError, CancelledError, GenerationError
from .events import ChatMessage, DepthResult, KProfile, Notice
from .library import ModelHome
from .policy.speculation import RoundObservation
from .profiles import save_profile
from .types import CompileMode, FinishReason, Precision

PROMPTS_FILE = "profile_prompts.json"

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
        CancelledError: `is_cancelled` said so; nothing is saved.
        BudgetError: The budget is too small even for K = 0.
        GenerationError: No reply had a second token.
    """
    if config.compile_mode is CompileMode.AUTO:
        config = replace(config, compile_mode=CompileMode.WAIT)
    depths = (0,) if config.precision is Precision.INT4 else sweep.depths
    told: set[str] = set()

    def tell(notice: Notice) -> None:
        if notice.code not in told:
            told.add(notice.code)
            on_notice(notice)

    def load(k: int) -> Engine:
        engine = Engine.load(
            home,
            replace(config, num_draft_tokens=k),
            cache_dir=cache_dir,
            on_notice=tell,
            is_cancelled=is_cancelled,
        )
        engine.executor.is_cancelled = is_cancelled
        return engine

    run = _SweepRun(load, load_prompts(sweep.num_prompts_per_kind), sweep, on_progress)
    for repeat in range(sweep.num_repeats):
        for k in list(depths):
            try:
                run.measure(k, repeat, depths)
            except BudgetError as error:
                if k == 0:
                    raise
                tell(Notice(code="profile-k0", text=f"Only K = 0 is measured: {error.message}"))
                depths = (0,)
                break
    profile = run.result()
    save_profile(home.root, run.profile_key, profile)
    return profile


class _SweepRun:
    """The replies of one sweep, and what they add up to."""

    def __init__(
        self,
        load: Callable[[int], Engine],
        prompts: Sequence[str],
        sweep: Sweep,
        on_progress: OnProgress,
    ) -> None:
        self._load = load
        self._prompts = prompts
        self._sweep = sweep
        self._on_progress = on_progress
        self._tpots_s: dict[int, list[float]] = {}
        self._num_accepted = 0
        self._num_judged = 0
        self._num_done = 0

    def measure(self, k: int, repeat: int, depths: Sequence[int]) -> None:
        """Loads the model with this K and answers all prompts."""
        total = len(depths) * len(self._prompts) * self._sweep.num_repeats
        detail = f"K {k}"
        if self._sweep.num_repeats > 1:
            detail += f", round {repeat + 1} of {self._sweep.num_repeats}"
        self._on_progress(self._num_done, total, f"{detail}, loading")
        engine = self._load(k)
        self.profile_key = engine.profile_key
        try:
            self._answer(engine, self._prompts[0])  # Fills the slots; not measured.
            engine.on_round = self._count
            for prompt in self._prompts:
                self._on_progress(self._num_done, total, detail)
                tpot_s = self._answer(engine, prompt)
                if tpot_s is not None:
                    self._tpots_s.setdefault(k, []).append(tpot_s)
                self._num_done += 1
            self._on_progress(self._num_done, total, detail)
        finally:
            engine.close()

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

    def result(self) -> KProfile:
        """Returns the profile of what was measured."""
        results = tuple(
            DepthResult(num_draft_tokens=k, tpot_s=sum(tpots) / len(tpots), num_replies=len(tpots))
            for k, tpots in sorted(self._tpots_s.items())
        )
        if not results:
            raise GenerationError(
                "No reply had two tokens, so nothing can be measured.",
                hint="This model ends its replies at once; give -k by hand.",
            )
        best = min(results, key=lambda each: (each.tpot_s, each.num_draft_tokens))
        acceptance = self._num_accepted / self._num_judged if self._num_judged else 0.0
        return KProfile(best=best.num_draft_tokens, acceptance=acceptance, results=results)
