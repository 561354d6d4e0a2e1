"""A hub of the tests' own, the model on it, and what a run without the hub makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
from hub_scenes import REPO, client_settings, hashes, publish
from huggingface_hub import constants
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Precision


@pytest.fixture
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.FakeHub]:
    """A hub without models that the client's settings lead to; its cache is empty, no token."""
    server = hub_server.FakeHub().start()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in client_settings(server, tmp_path).items():
        monkeypatch.setattr(constants, name, value)
    yield server
    huggingface_hub.close_session()
    server.close()


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository's folder: ten shards, and files that nobody should fetch. Read only."""
    return publish(tmp_path_factory.mktemp("published") / "tiny")


@pytest.fixture(scope="session")
def whole(published: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hashes of a preparation of the same checkpoint without a hub."""
    home = ModelLibrary(tmp_path_factory.mktemp("whole")).resolve(str(published))
    prepare(home, Precision.NESTED, on_progress=lambda *args: None)
    return hashes(home)


@pytest.fixture
def hub_with_model(empty_hub: hub_server.FakeHub, published: Path) -> hub_server.FakeHub:
    """The hub with the published repository."""
    empty_hub.add(REPO, published)
    return empty_hub


@pytest.fixture
def hub_library(hub_with_model: hub_server.FakeHub, tmp_path: Path) -> ModelLibrary:
    """An empty library whose models come from that hub."""
    return ModelLibrary(tmp_path / "data")
