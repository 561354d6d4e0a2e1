"""The C++ kernels, loaded for those tests alone that ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mira_kernels import native


@pytest.fixture
def native_kernels(native_cache: Path):
    """The operators `torch.ops.mira`, loaded."""
    import torch

    status = native.load(native_cache)
    assert status.is_available, status.reason
    return torch.ops.mira
