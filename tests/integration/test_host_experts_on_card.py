"""The engine on a card whose misses the processor computes in part: the same texts, and its end.

As in `test_gpu_engine`: kernels in triton's interpreter, copies on queues that check their
order, memory the host's. Rates are given, so that what is computed where does not depend on
this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_card import (
    Load,
    Prepared,
    loading,
    plug_in_card,
    plug_in_recording_card,
    preparing,
)
from fake_queues import FakeQueues
from mira_engine.config import LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import StoreError
from mira_engine.events import Notice
from mira_engine.library import ModelHome
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.host_misses import HostMisses, HostSetup
from mira_engine.policy.replay import DecisionLog, replay
from mira_engine.runtime import gpu_device, host_records
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.host_experts import HostExperts
from mira_engine.types import CachePolicy, DraftExperts, FinishReason, Precision

pytest.importorskip("triton", reason="triton has no wheel for this system")

NEW_TOKENS = 6
ON_CARD = {"gpu": 0, "budget": MemoryAmount(share=0.8)}
PROMPT = [7, 99, 23]
ALL = HostSetup(expert_s=1e-9, token_s=0.0, record_s=1.0, num_held=0)
"""Every miss of a few tokens is computed on the host."""
SOME = replace(ALL, expert_s=1.0)
"""Of several misses in a layer, half."""


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Prepared:
    """Prepares a family's tiny checkpoint in a precision, once."""
    return preparing(tmp_path_factory.mktemp("host"), tiny_checkpoint)


@pytest.fixture(autouse=True)
def queues(monkeypatch: pytest.MonkeyPatch) -> FakeQueues:
    """A card; launches are checked against copies."""
    return plug_in_card(monkeypatch)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[[HostSetup], None]:
    """Says what would have been measured, and that it stays so."""

    def say(setup: HostSetup) -> None:
        def measured(host, transfer, module, shape, dtype, held, *, is_cancelled) -> HostSetup:
            return replace(setup, num_held=len(held))

        monkeypatch.setattr(gpu_device, "measure_host", measured)
        monkeypatch.setattr(HostMisses, "end_pass", end_pass)

    real = HostMisses.end_pass

    def end_pass(self: HostMisses, host_s: float) -> None:
        real(self, self._expected_s)

    return say


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads engines on a card with few slots, and closes them."""
    with loading() as load:

        def on_card(home: ModelHome, *args: object, **changes: object) -> Engine:
            return load(home, *args, **(ON_CARD | changes))

        yield on_card


def _text(engine: Engine, **sampling: object) -> list[int]:
    engine.state.reset()
    wanted = SamplingConfig(**{"max_new_tokens": NEW_TOKENS} | sampling)
    return [step for step in engine.reply(PROMPT, wanted) if isinstance(step, int)]


def _num_on_host(engine: Engine) -> int:
    return engine.stats().num_on_host


# -- the same texts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "setup"),
    [("mixtral", ALL), ("qwen2_moe", ALL), ("qwen2_moe", SOME), ("gpt_oss", ALL)],
    ids=["mixtral", "qwen2_moe", "qwen2_moe in part", "gpt_oss"],
)
def test_text_with_the_host_is_the_processors(
    family: str, setup: HostSetup, prepared, load, rates
) -> None:
    home = prepared(family, Precision.BF16)
    rates(setup)
    expected = _text(load(home, gpu=None))

    engine = load(home)

    assert _text(engine) == expected
    stats = engine.stats()
    assert 0 < stats.num_on_host <= stats.num_misses
    assert (stats.num_on_host < stats.num_misses) == (setup is SOME)
    assert stats.host_s > 0


def test_text_of_captured_steps_with_the_host_is_the_processors(
    prepared, load, rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("mixtral", Precision.BF16, has_windows=False)
    rates(ALL)
    expected = _text(load(home, gpu=None))
    plug_in_recording_card(monkeypatch)

    engine = load(home)

    assert _text(engine) == expected
    assert _num_on_host(engine) > 0
    assert engine.executor.meter.num_compiled_passes == NEW_TOKENS - 1


def test_load_that_ends_while_rates_are_measured_closes_the_link(
    prepared, load, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    close = CudaTransfer.close
    monkeypatch.setattr(CudaTransfer, "close", lambda self: (closed.append(self), close(self)))

    def fail(*args: object, **kwargs: object) -> None:
        raise StoreError("A record cannot be read.", hint="")

    monkeypatch.setattr(gpu_device, "measure_host", fail)

    with pytest.raises(StoreError):
        load(prepared("mixtral", Precision.BF16))

    assert len(closed) == 1


def test_text_with_everything_left_to_the_card_is_the_same(prepared, load, rates) -> None:
    home = prepared("mixtral", Precision.BF16)
    rates(ALL)
    alone = load(home, is_deterministic=True)

    assert _text(alone) == _text(load(home, gpu=None))
    assert alone.executor.host is None
    assert alone.stats().num_misses > _num_on_host(alone) == 0


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.NESTED, Precision.INT4])
def test_text_of_quantised_experts_with_the_host_is_the_processors(
    precision: Precision, prepared, load, rates
) -> None:
    home = prepared("qwen2_moe", precision)
    rates(ALL)
    budget = MemoryAmount(share=0.4 if precision is Precision.INT4 else 0.8)
    expected = _text(load(home, precision=precision, budget=budget, gpu=None))

    engine = load(home, precision=precision, budget=budget)

    assert _text(engine) == expected
    assert _num_on_host(engine) > 0


def test_verification_with_the_host_rolls_back_to_the_same_text(prepared, load, rates) -> None:
    home = prepared("qwen2_moe", Precision.INT8)
    rates(ALL)
    expected = _text(load(home, precision=Precision.INT8, gpu=None))

    engine = load(
        home, precision=Precision.INT8, draft_experts=DraftExperts.ALL, num_draft_tokens=2,
        is_prefetch_enabled=False, budget=MemoryAmount(share=1.2),
    )  # fmt: skip

    assert _text(engine) == expected
    meter = engine.executor.meter
    assert 0 < meter.num_accepted < meter.num_drafted
    assert _num_on_host(engine) > 0


@pytest.mark.parametrize("policy", [CachePolicy.POOL, CachePolicy.REGIONS])
def test_hot_experts_come_to_the_card_in_the_end(policy, prepared, load, rates) -> None:
    rates(ALL)
    engine = load(prepared("mixtral", Precision.BF16), cache_policy=policy)
    log = engine.executor.driver.on_decision = DecisionLog()

    assert len(_text(engine, max_new_tokens=12)) == 12

    assert any('"recurring"' in line for line in log.lines)
    assert engine.executor.meter.decode.num_records > 0
    assert replay(log.lines, ExpertCacheDriver(engine.cache_setup)) is None


# -- where it is not done -------------------------------------------------------------------


def test_card_with_a_resident_draft_of_the_same_planes_has_no_host(prepared, load, rates) -> None:
    rates(ALL)
    engine = load(
        prepared("qwen2_moe", Precision.NESTED), precision=Precision.NESTED, num_draft_tokens=3,
        draft_experts=DraftExperts.ALL, budget=MemoryAmount(share=1.0),
    )  # fmt: skip
    assert engine.executor.host is None
    assert engine.cache_setup.host is None


def test_records_on_the_disk_are_left_to_the_card(prepared, load, rates, monkeypatch) -> None:
    monkeypatch.setattr(host_records, "HOST_SHARE", 0.0)
    engine = load(prepared("mixtral", Precision.BF16))
    assert engine.cache_setup.host is None
    assert len(_text(engine)) == NEW_TOKENS
    assert _num_on_host(engine) == 0


def test_seed_leaves_all_experts_to_the_card(prepared, load, rates) -> None:
    rates(ALL)
    engine = load(prepared("mixtral", Precision.BF16))
    assert len(_text(engine, temperature=1.0, seed=3, max_new_tokens=3)) == 3
    assert _num_on_host(engine) == 0
    _text(engine, temperature=1.0, max_new_tokens=3)
    assert _num_on_host(engine) > 0


def test_processor_alone_does_not_mind_the_option(prepared, load) -> None:
    home = prepared("mixtral", Precision.BF16)
    texts = [_text(load(home, gpu=None, is_deterministic=on)) for on in (False, True)]
    assert texts[0] == texts[1]


# -- what is told ---------------------------------------------------------------------------


def test_host_is_told_once_and_only_when_used(prepared, load, rates) -> None:
    rates(ALL)
    notices: list[Notice] = []
    engine = load(prepared("mixtral", Precision.BF16), notices)
    assert "host-experts" not in {notice.code for notice in notices}
    _text(engine)
    _text(engine)
    (told,) = [notice for notice in notices if notice.code == "host-experts"]
    assert "--deterministic" in told.text


def test_rates_of_a_real_load_are_measured(prepared, load) -> None:
    engine = load(prepared("mixtral", Precision.BF16), link=LinkConfig(bytes_per_s=1e9))
    host = engine.cache_setup.host
    assert host.record_s == pytest.approx(engine.transfer.record_bytes / 1e9)
    assert host.expert_s > 0
    assert host.num_held == engine.cache_setup.num_layers * engine.cache_setup.num_experts
    assert len(_text(engine)) == NEW_TOKENS


# -- when it ends badly ---------------------------------------------------------------------


def test_error_of_the_host_reaches_the_reply_and_the_next_one_works(
    prepared, load, rates, monkeypatch
) -> None:
    home = prepared("mixtral", Precision.BF16)
    rates(ALL)
    expected = _text(load(home, gpu=None))
    engine = load(home)
    compute, num_left = HostExperts._compute, 3

    def fail_once(self, *arguments) -> float:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise StoreError("a damaged record", hint="Prepare the model again.")
        return compute(self, *arguments)

    monkeypatch.setattr(HostExperts, "_compute", fail_once)
    with pytest.raises(StoreError, match="damaged"):
        _text(engine)
    assert _text(engine) == expected
    assert num_left < 0


def test_reply_that_is_cancelled_beside_the_host_goes_on_correctly(
    prepared, load, rates, monkeypatch
) -> None:
    home = prepared("qwen2_moe", Precision.BF16)
    rates(ALL)
    expected = _text(load(home, gpu=None))
    engine = load(home)
    begin, num_begun = HostExperts.begin, 0

    def begin_and_cancel(self, module, demand) -> None:
        nonlocal num_begun
        begin(self, module, demand)
        num_begun += 1
        if num_begun == 4:
            engine.cancel()
            monkeypatch.setattr(self, "wait", lambda timeout_s: False)

    monkeypatch.setattr(HostExperts, "begin", begin_and_cancel)
    engine.state.reset()
    reply, reason = engine.reply(PROMPT, SamplingConfig(max_new_tokens=NEW_TOKENS)), None
    while reason is None:
        try:
            next(reply)
        except StopIteration as stop:
            reason = stop.value
    assert reason is FinishReason.CANCELLED
    assert engine.executor.host.is_busy, "it was broken off in a layer"

    engine.clear_cancel()
    del engine.executor.host.wait
    assert _text(engine) == expected
