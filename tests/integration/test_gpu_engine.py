"""The engine on a card gives what it gives on a processor: the whole path, without a card.

Kernels run in triton's interpreter, copies on queues that check their order; memory is the
host's. What only a card can show (speed, overlap, its own arithmetic) is for `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_card import Load, Prepared, loading, plug_in_card, preparing, reply_of
from fake_queues import FakeQueues
from mira_engine.config import MemoryAmount
from mira_engine.engine import Engine
from mira_engine.errors import ConfigError
from mira_engine.events import Notice
from mira_engine.runtime import host_records
from mira_engine.types import DraftExperts, Precision

pytest.importorskip("triton", reason="triton has no wheel for this system")

NEW_TOKENS = 6
"""Two rounds of a draft; the interpreter takes its time over each."""


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Prepared:
    return preparing(tmp_path_factory.mktemp("gpu"), tiny_checkpoint)


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> FakeQueues:
    return plug_in_card(monkeypatch)


@pytest.fixture
def load() -> Iterator[Load]:
    with loading() as load:
        yield load


def _text(engine: Engine) -> list[int]:
    return reply_of(engine, NEW_TOKENS)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "nemotron_h"])
def test_text_on_a_card_is_the_processors(family: str, prepared, load, queues: FakeQueues) -> None:
    home = prepared(family, Precision.BF16)
    expected = _text(load(home))

    engine = load(home, gpu=0)

    assert _text(engine) == expected
    assert queues.copies


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.NESTED, Precision.INT4])
def test_text_of_quantised_experts_on_a_card_is_the_processors(
    precision: Precision, prepared, load, queues: FakeQueues
) -> None:
    home = prepared("qwen2_moe", precision)
    expected = _text(load(home, precision=precision))

    assert _text(load(home, precision=precision, gpu=0)) == expected


def test_text_does_not_depend_on_the_budget(prepared, load, queues: FakeQueues) -> None:
    home = prepared("qwen2_moe", Precision.NESTED)
    expected = _text(load(home, precision=Precision.NESTED))  # as with all experts on the card
    small = load(home, precision=Precision.NESTED, gpu=0, budget=MemoryAmount(share=0.6))
    assert small.plan.num_slots < small.cache_setup.num_layers * small.cache_setup.num_experts

    assert _text(small) == expected
    meter = small.executor.meter
    assert meter.decode.num_misses > 0


@pytest.mark.parametrize("experts", [DraftExperts.ALL, DraftExperts.CACHED])
def test_draft_on_a_card_changes_no_text_and_is_accepted_in_part(
    experts: DraftExperts, prepared, load, queues: FakeQueues
) -> None:
    home = prepared("qwen2_moe", Precision.NESTED)
    expected = _text(load(home, precision=Precision.NESTED))  # as without a draft on the card
    drafting = load(
        home, precision=Precision.NESTED, gpu=0, num_draft_tokens=3, draft_experts=experts
    )

    assert _text(drafting) == expected
    assert drafting.executor.meter.num_drafted > 0
    assert drafting.executor.meter.num_accepted > 0


def test_draft_on_a_card_names_what_verification_needs(prepared, load, queues: FakeQueues) -> None:
    home = prepared("qwen2_moe", Precision.NESTED)
    engine = load(
        home,
        precision=Precision.NESTED,
        gpu=0,
        budget=MemoryAmount(share=1.0),
        num_draft_tokens=3,
        draft_experts=DraftExperts.ALL,
    )

    _text(engine)

    assert engine.executor.meter.decode.num_prefetched > 0


def test_experts_beyond_host_memory_come_from_the_disk_and_are_told(
    prepared, load, queues: FakeQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("mixtral", Precision.BF16)
    expected = _text(load(home))
    monkeypatch.setattr(host_records, "HOST_SHARE", 0.0)
    notices: list[Notice] = []

    engine = load(home, notices, gpu=0, budget=MemoryAmount(share=1.0))

    assert _text(engine) == expected
    assert "host-memory" in {notice.code for notice in notices}


def test_precision_without_a_kernel_is_refused(prepared, load, queues: FakeQueues) -> None:
    home = prepared("mixtral", Precision.FLOAT32)

    with pytest.raises(ConfigError, match="float32"):
        load(home, precision=Precision.FLOAT32, gpu=0)


def test_card_that_is_not_there_is_refused(prepared, load, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigError) as caught:
        load(prepared("mixtral", Precision.BF16), gpu=0)

    assert "doctor" in caught.value.hint
