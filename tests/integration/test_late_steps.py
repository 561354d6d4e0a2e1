"""Steps that are compiled while a reply is made are the next one's, and so is what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from fake_card import BASE, PROMPT, Load, loading, preparing, reply_of
from mira_engine import profiling, several
from mira_engine.config import SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelHome
from mira_engine.memory_retry import LastingReplies
from mira_engine.runtime import reply_so_far
from mira_engine.runtime.telemetry import ReplyMeter
from mira_engine.types import CompileMode, Precision

NUM_TOKENS = 5
BRIEF = SamplingConfig(max_new_tokens=NUM_TOKENS)
TAKING_S = 1000.0


@dataclass
class FakeNativePath:
    """Has something to take up whenever somebody says so; taking it is slow.

    Attributes:
        is_ready: Whether there is something.
        now: Seconds, of every meter in the test.
        num_cached_at: Tokens in the cache at each look.
    """

    is_ready: bool = False
    now: float = 0.0
    num_cached_at: list[int] = field(default_factory=list)
    count_cached: Callable[[], int] = lambda: 0

    def take(self) -> bool:
        """Takes it up."""
        self.num_cached_at.append(self.count_cached())
        taken, self.is_ready = self.is_ready, False
        self.now += TAKING_S * taken
        return taken

    def close(self) -> None:
        """Nothing is under way."""


class FakeGovernor:
    """Counts how often it is told that what it has learnt is void."""

    candidates = (0,)

    def __init__(self) -> None:
        self.num_forgotten = 0

    def forget_costs(self) -> None:
        self.num_forgotten += 1


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    prepared = preparing(tmp_path_factory.mktemp("late"), tiny_checkpoint)
    return prepared("olmoe", Precision.BF16, has_windows=False)


@pytest.fixture
def load() -> Iterator[Load]:
    with loading() as load_any:
        yield load_any


@pytest.fixture
def engine(home: ModelHome, load: Load) -> Engine:
    """An engine on which nothing is compiled but what the test says."""
    return load(home, context_length=256)


@pytest.fixture
def path(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> FakeNativePath:
    """What the engine takes up; its seconds are the meters'."""
    made = FakeNativePath(count_cached=lambda: engine.state.num_cached)
    engine.native_path = made
    meter = partial(ReplyMeter, clock=lambda: made.now)
    for module in (reply_so_far, several):
        monkeypatch.setattr(module, "ReplyMeter", meter)
    return made


def test_step_that_lands_in_a_reply_is_taken_up_before_the_next(
    engine: Engine, path: FakeNativePath
) -> None:
    steps = engine.reply(PROMPT, BRIEF)
    made = [next(steps)]
    path.is_ready = True
    made += steps

    assert path.is_ready, "roundings differ: it was taken up in the middle of a text"
    assert path.num_cached_at == [0]
    assert sum(isinstance(step, int) for step in made) == NUM_TOKENS
    reply_of(engine, 2)
    assert not path.is_ready


@pytest.mark.parametrize("way", ["reply", "lasting reply", "batch", "search"])
def test_seconds_of_taking_steps_up_are_not_the_replys(
    engine: Engine, path: FakeNativePath, way: str
) -> None:
    path.is_ready = True

    if way == "reply":
        reply_of(engine, NUM_TOKENS)
    elif way == "lasting reply":
        replies = LastingReplies(lambda: engine, lambda choose: None, lambda notice: None)
        list(replies.reply(PROMPT, BRIEF))
    elif way == "batch":
        list(engine.generate([PROMPT, PROMPT[:3]], BRIEF))
    else:
        engine.beam_search(PROMPT, num_beams=2, max_new_tokens=3)

    assert path.now == TAKING_S, "it was taken up"
    stats = engine.stats()
    assert (stats.elapsed_s, stats.ttft_s, stats.decode_s) == (0, 0, 0)


@pytest.mark.parametrize("is_ready", [True, False])
def test_governor_forgets_what_slower_steps_cost_only_where_others_were_taken_up(
    engine: Engine, path: FakeNativePath, is_ready: bool
) -> None:
    engine.governor = governor = FakeGovernor()
    path.is_ready = is_ready

    engine.take_compiled()

    assert governor.num_forgotten == is_ready


def test_profile_waits_for_steps_so_that_none_lands_between_two_of_its_replies(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modes = []

    def refuse(home: ModelHome, config: object, **kwargs: object) -> Engine:
        modes.append(config.compile_mode)
        raise InterruptedError

    monkeypatch.setattr(Engine, "load", refuse)
    assert BASE.compile_mode is CompileMode.AUTO
    with pytest.raises(InterruptedError):
        profiling.profile_model(
            home,
            BASE,
            profiling.QUICK_SWEEP,
            cache_dir=tmp_path,
            on_progress=lambda *_: None,
            on_notice=lambda notice: None,
        )

    assert modes == [CompileMode.WAIT]
