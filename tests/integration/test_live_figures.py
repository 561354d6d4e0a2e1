"""What panels show of the engine adds up: stalls, sampling, the link, the map of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, LinkConfig, MachineRates, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage, GenerationDone, ReplyStats, ResidencySample, StatsSample
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime import executor as executor_module
from mira_engine.runtime import telemetry
from mira_engine.runtime.probe import PROFILE_FILE, MachineProfile
from mira_engine.types import CachePolicy, CompileMode, ComputeDtype, Precision, Region
from ticking_clock import TickingClock

CHAT = (ChatMessage(role="user", content="Hello, who are you?"),)
SLOW = LinkConfig(latency_s=1e-3)
"""Records that are worth waiting for."""
SAMPLING = SamplingConfig(max_new_tokens=24)
CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=0.4),
    num_draft_tokens=0,
    context_length=128,
    num_threads=1,
)


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    library = ModelLibrary(tmp_path_factory.mktemp("live"))
    made = library.resolve(str(tiny_checkpoint("qwen3_moe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture
def load(home: ModelHome) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(cache_dir: Path | None = None, **changes: object) -> Engine:
        engines.append(Engine.load(home, replace(CONFIG, **changes), cache_dir=cache_dir))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures at every token."""
    monkeypatch.setattr(telemetry, "STATS_INTERVAL_S", 0.0)
    monkeypatch.setattr(telemetry, "RESIDENCY_INTERVAL_S", 0.0)


def _stats(engine: Engine) -> ReplyStats:
    *_, done = engine.stream("r", CHAT, SAMPLING)
    assert isinstance(done, GenerationDone)
    return done.stats


@pytest.mark.parametrize(("share", "k"), [(0.4, 0), (0.9, 4)])
def test_parts_of_the_time_fit_into_it(load: Callable[..., Engine], share: float, k: int) -> None:
    engine = load(budget=MemoryAmount(share=share), num_draft_tokens=k, link=SLOW)
    stats = _stats(engine)
    assert stats.stall_s > 0
    assert 0 <= stats.prefetch_stall_s <= stats.stall_s
    assert stats.sample_s > 0
    assert stats.stall_s + stats.sample_s <= stats.verify_s
    assert stats.draft_s + stats.verify_s <= stats.decode_s
    assert stats.ttft_s + stats.decode_s <= stats.elapsed_s
    assert (stats.draft_s > 0) == (k > 0)


def test_stalls_without_prefetch_are_all_for_misses(load: Callable[..., Engine]) -> None:
    stats = _stats(load(is_prefetch_enabled=False))
    assert stats.stall_s > 0
    assert stats.prefetch_stall_s == 0


def test_wait_counts_as_prefetched_only_where_all_was_on_its_way(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = LinkConfig(latency_s=0.02)  # Longer than a draft.
    engine = load(budget=MemoryAmount(share=0.9), num_draft_tokens=4, link=link)
    waits: list[bool] = []
    expected = {False: 0, True: 0}
    executor, driver = engine.executor, engine.executor.driver
    await_some = executor._await_some

    def watched() -> list:
        awaited = [one.served_by.value for one in driver.open_layer.waiting.values()]
        is_ahead = not driver.open_layer.missing and "miss" not in awaited
        before = executor.meter.decode.stall_s
        ready = await_some()
        expected[is_ahead] += executor.meter.decode.stall_s - before
        waits.append(is_ahead)
        return ready

    monkeypatch.setattr(executor, "_await_some", watched)
    monkeypatch.setattr(executor_module, "time", TickingClock())
    stats = _stats(engine)
    assert set(waits) == {False, True}
    assert stats.prefetch_stall_s == expected[True]
    assert stats.stall_s == expected[True] + expected[False]


@pytest.mark.parametrize("policy", [CachePolicy.POOL, CachePolicy.REGIONS])
def test_every_picture_of_the_cache_agrees_with_residency(
    load: Callable[..., Engine], policy: CachePolicy, always_due: None
) -> None:
    engine = load(cache_policy=policy)
    residency, setup = engine.executor.driver.residency, engine.cache_setup
    pictures = 0
    for event in engine.stream("r", CHAT, SAMPLING, is_residency_wanted=True):
        if not isinstance(event, ResidencySample):
            continue
        pictures += 1
        assert [len(row) for row in event.regions] == [setup.num_experts] * setup.num_layers
        shown = {
            (layer, expert): mark
            for layer, row in enumerate(event.regions)
            for expert, mark in enumerate(row)
            if mark != "."
        }
        assert set(shown) == {tuple(expert) for expert, _ in residency.residents()}
        assert sum(mark == "s" for mark in shown.values()) == residency.num_loading
        hot = {
            tuple(expert)
            for expert, slot in residency.residents()
            if residency.region(slot) is Region.HOT and residency.is_ready(expert)
        }
        is_labelled = policy is CachePolicy.REGIONS
        assert {e for e, mark in shown.items() if mark == "H"} == (hot if is_labelled else set())
    assert pictures > 2


def test_heat_is_highest_where_most_was_routed(
    load: Callable[..., Engine], always_due: None
) -> None:
    engine = load()
    counts: dict[tuple[int, int], int] = {}

    def observe(name: str, arguments: tuple, actions: object) -> None:
        if name == "enter_layer":
            for expert, num_tokens in arguments[1]:
                key = (arguments[0], expert)
                counts[key] = counts.get(key, 0) + num_tokens

    engine.executor.driver.on_decision = observe
    *_, picture, _ = engine.stream("r", CHAT, SAMPLING, is_residency_wanted=True)
    assert isinstance(picture, ResidencySample)
    heat = {
        (layer, expert): int(digit)
        for layer, row in enumerate(picture.heat)
        for expert, digit in enumerate(row)
    }
    assert {expert for expert, level in heat.items() if level} == set(counts)
    assert heat[max(counts, key=counts.__getitem__)] == 9


def test_nothing_is_counted_or_drawn_for_the_map_where_nobody_looks(
    load: Callable[..., Engine], always_due: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    monkeypatch.setattr(engine, "residency_sample", None)
    events = list(engine.stream("r", CHAT, SAMPLING))
    assert any(isinstance(event, StatsSample) for event in events)
    assert not any(isinstance(event, ResidencySample) for event in events)
    assert engine.executor.heat is None


def test_looking_changes_no_decision(load: Callable[..., Engine], always_due: None) -> None:
    logs = []
    for is_wanted in (False, True):
        engine = load(cache_policy=CachePolicy.REGIONS, is_prefetch_enabled=False)
        log: list[tuple] = []
        engine.executor.driver.on_decision = lambda name, args, actions, log=log: (
            log.append((name, args, tuple(actions))) if name == "enter_layer" else None
        )
        list(engine.stream("r", CHAT, SAMPLING, is_residency_wanted=is_wanted))
        logs.append([(name, args) for name, args, _ in log])
    assert logs[0] == logs[1]


def test_link_rate_is_emulated_measured_or_unknown(
    load: Callable[..., Engine], tmp_path: Path
) -> None:
    assert load().link_bytes_per_s == 0
    slow = LinkConfig(bytes_per_s=3e8)
    assert load(link=slow).link_bytes_per_s == 3e8
    rates = MachineRates(
        name="m",
        device_memory_bytes=2**33,
        device_bytes_per_s=1e10,
        flops_per_s=1e11,
        link_bytes_per_s=2e9,
    )
    MachineProfile(tmp_path / PROFILE_FILE).keep_rates(rates, 1)
    assert load(tmp_path, compile_mode=CompileMode.OFF).link_bytes_per_s == 2e9
    assert load(tmp_path, compile_mode=CompileMode.OFF, link=slow).link_bytes_per_s == 3e8
