"""Engines on tiny models whose requests end by their length, and the batches that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from batch_scenes import BASE, IN_TURN_FAMILIES, Load, Prepared
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime.batch import BatchDecoder
from mira_engine.runtime.requests import BatchEvent
from mira_engine.types import Precision


@pytest.fixture(scope="session")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Prepared:
    """Prepares a family's tiny checkpoint once, without windows where it can be without."""
    library = ModelLibrary(tmp_path_factory.mktemp("batch"))
    ready: set[tuple[str, Precision]] = set()

    def make(family: str, precision: Precision = Precision.FLOAT32) -> ModelHome:
        folder = tiny_checkpoint(family, has_windows=family in IN_TURN_FAMILIES)
        home = library.resolve(str(folder))
        if (family, precision) not in ready:
            prepare(home, precision, on_progress=lambda *_: None, is_cancelled=lambda: False)
            ready.add((family, precision))
        return home

    return make


@pytest.fixture
def notices() -> list[Notice]:
    return []


@pytest.fixture
def load(prepared: Prepared, notices: list[Notice]) -> Iterator[Load]:
    """Loads engines whose replies have no end but their length."""
    engines: list[Engine] = []

    def make(family: str = "olmoe", **changes: object) -> Engine:
        config = replace(BASE, **changes)
        home = prepared(family, config.precision)
        engine = Engine.load(home, config, on_notice=notices.append)
        engine._end_ids = frozenset()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[BatchDecoder]:
    """The decoders that engines make in this test."""
    made: list[BatchDecoder] = []
    run = BatchDecoder.run

    def noting_run(self: BatchDecoder) -> Iterator[BatchEvent]:
        made.append(self)
        return run(self)

    monkeypatch.setattr(BatchDecoder, "run", noting_run)
    return made


@pytest.fixture
def set_threshold(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the share of removable entries above which batches are compacted from now on."""
    make = BatchDecoder.__init__

    def set_to(threshold: float) -> None:
        def with_threshold(self: BatchDecoder, *args: object, **kwargs: object) -> None:
            make(self, *args, **kwargs, compact_above=threshold)

        monkeypatch.setattr(BatchDecoder, "__init__", with_threshold)

    return set_to
