"""One build of the C++ kernels a session, loaded for those tests alone that ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from mira_kernels import native


@pytest.fixture(scope="session")
def native_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the built library."""
    if native.compiler() is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("native")
    status = native.build(folder)
    assert status.is_available, status.reason
    return folder


@pytest.fixture
def native_kernels(native_cache: Path):
    """The operators `torch.ops.mira`, loaded."""
    import torch

    status = native.load(native_cache)
    assert status.is_available, status.reason
    return torch.ops.mira


@pytest.fixture(autouse=True)
def _native_only_where_asked(request, monkeypatch):
    """Hides a library that an earlier test loaded from tests that do not ask for it."""
    if "native_kernels" not in request.fixturenames:
        monkeypatch.setattr(native, "_loaded", None)
