"""What a batch's passes are given, what they leave out, and what they leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from batch_scenes import PROMPTS, Load, collect, make_samplings, replies_alone, some_tokens
from mira_engine.config import SamplingConfig
from mira_engine.errors import CancelledError
from mira_engine.model import operators
from mira_engine.model.batch_state import (
    PADDED_ATTENTION_IMPLEMENTATION,
    BatchState,
    attending_padded,
)
from mira_engine.model.experts import only_rows
from mira_engine.model.linear import DenseSwitch
from mira_engine.runtime import passes as runtime_passes
from mira_engine.runtime.draft import DraftWindow
from mira_engine.runtime.passes import ModelPasses
from mira_engine.types import Phase

# -- where it computes ---------------------------------------------------------------------------

ELSEWHERE = torch.device("meta")
"""A device that is not the host and needs no hardware; it holds no values."""


class FakeLogits:
    """Logits that are on another device until they are fetched."""

    def cpu(self) -> torch.Tensor:
        return torch.zeros(2, 1, 264)


def test_batch_pass_gives_all_inputs_to_the_models_device_and_logits_to_the_host(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, given = load(), []
    state = BatchState(engine.model.config, num_rows=2, num_columns=12)
    passes = ModelPasses(
        engine.model, engine.executor, engine.state, DenseSwitch(), device=ELSEWHERE
    )

    def forward(self: object, **inputs: object) -> SimpleNamespace:
        given.extend(value for value in inputs.values() if isinstance(value, torch.Tensor))
        return SimpleNamespace(logits=FakeLogits())

    @contextmanager
    def noting_rows(modules: object, rows: torch.Tensor) -> Iterator[None]:
        given.append(rows)
        yield

    monkeypatch.setattr(type(engine.model), "forward", forward)
    monkeypatch.setattr(runtime_passes, "only_rows", noting_rows)
    logits = passes.forward_batch(state, [[5, 6], [7]], Phase.PREFILL, logits_at=[1])

    assert [tensor.device for tensor in given] == [ELSEWHERE] * 5
    assert logits.shape == (2, 1, 264)
    assert logits.device.type == "cpu"


# -- what is routed and looked ahead ---------------------------------------------------------------


def test_padding_is_routed_to_no_expert(load: Load) -> None:
    engine = load()
    requests = [some_tokens(1, 0), some_tokens(40, 1)]
    sampling = SamplingConfig(max_new_tokens=1)
    collect(engine.generate(requests, sampling))
    traffic = engine.executor.meter.prefill
    num_layers = engine.executor.driver.lookahead.num_layers
    assert traffic.num_hits + traffic.num_misses == 41 * engine._top_k * num_layers


def test_lookahead_counts_all_running_requests(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(num_draft_tokens=3)
    counts = []
    advance = DraftWindow.advance

    def counting(self: DraftWindow, num_passes: int) -> None:
        lookahead = engine.executor.driver.lookahead
        counts.append(sum(n for _, n in lookahead.ranking(0)))
        advance(self, num_passes)

    monkeypatch.setattr(DraftWindow, "advance", counting)
    collect(engine.generate(PROMPTS[:3], SamplingConfig(max_new_tokens=5)))
    # After the first and the second draft token of three requests.
    assert counts[:2] == [3 * engine._top_k, 6 * engine._top_k]
    assert engine.executor.driver.lookahead.is_empty


# -- the native kernel knows one row without holes ----------------------------------------------


def test_batches_and_beams_never_use_the_native_attention(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(num_draft_tokens=3)

    def refuse(*_: object) -> None:
        raise AssertionError("native attention")

    monkeypatch.setattr(operators, "has_native_attention", lambda: True)
    monkeypatch.setattr(operators, "native_attention", refuse)
    with pytest.raises(AssertionError, match="native attention"):
        replies_alone(engine, PROMPTS[:1], make_samplings()[:1])
    collect(engine.generate(PROMPTS, make_samplings()))
    engine.beam_search(PROMPTS[1], num_beams=2, max_new_tokens=3)


# -- what is changed during a pass is changed back ------------------------------------------------


def test_padded_attention_and_row_filter_end_with_their_blocks(load: Load) -> None:
    engine = load()
    modules = engine.passes._modules
    before = [module.__dict__["_mira"] for module in modules]
    implementation = engine.model.config._attn_implementation

    def fail_inside() -> None:
        with attending_padded(engine.model), only_rows(modules, torch.tensor([0])):
            assert engine.model.config._attn_implementation == PADDED_ATTENTION_IMPLEMENTATION
            assert [module.__dict__["_mira"] for module in modules] != before
            raise CancelledError("Stopped.")

    with pytest.raises(CancelledError):
        fail_inside()
    assert [module.__dict__["_mira"] for module in modules] == before
    assert engine.model.config._attn_implementation == implementation
