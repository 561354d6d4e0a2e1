"""What all tests share: one torch thread, no network, tiny checkpoints, empty data folders.

The environment is set before anything imports torch or transformers, and child
processes inherit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch

REPOSITORY = Path(__file__).resolve().parent.parent

# With two threads on a busy two-core machine torch calls stall by tens of milliseconds.
os.environ["OMP_NUM_THREADS"] = "1"
# GPU kernels run in triton's interpreter; it decides when they are decorated.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

# What the person who runs the tests has chosen for their own chats must not decide them.
for _variable in [name for name in os.environ if name.startswith("MIRA_CHAT_")]:
    del os.environ[_variable]
for _variable in ("MIRA_CONNECT", "MIRA_API_KEY", "OPENAI_API_KEY"):
    os.environ.pop(_variable, None)
os.environ["MIRA_CHAT_CONFIG"] = str(REPOSITORY / "tests" / "empty-settings.toml")

# An example may take as long as a busy machine makes it.
hypothesis.settings.register_profile(
    "any-speed",
    hypothesis.settings.default,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any-speed")

SaveTiny = Callable[..., Path]
"""`(family, *, seed=0, dtype=torch.float32, max_shard_size="1GB", tokenizer=False) -> Path`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the soaks, which run for many minutes, and what needs GPTQModel, unless `-m`
    names them."""
    unnamed = [mark for mark in ("soak", "gptq") if mark not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unnamed))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's top folder."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_inputs() -> Path:
    """Folder of the shared real inputs; the test is skipped where there is none."""
    folder = Path(os.environ.get("MIRA_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared inputs at {folder}; set MIRA_SHARED to their folder")
    return folder


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder that the app, the engine and child processes use in this test.

    Nothing is compiled unless a test asks for it: with two cores that would slow all others.
    """
    folder = tmp_path / "data"
    folder.mkdir()
    settings = tmp_path / "config.toml"
    settings.touch()
    monkeypatch.setenv("MIRA_CHAT_DATA_DIR", str(folder))
    monkeypatch.setenv("MIRA_CHAT_CONFIG", str(settings))
    monkeypatch.setenv("MIRA_CHAT_COMPILE", "off")
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SaveTiny:
    """Writes a tiny random checkpoint once a session, and returns its folder. Read only."""
    made: dict[tuple[object, ...], Path] = {}

    def save(
        family: str,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        max_shard_size: str = "1GB",
        has_windows: bool = True,
        tokenizer: bool = False,
    ) -> Path:
        import torch
        from tiny_models import save_tiny, tiny_tokenizer

        dtype = dtype or torch.float32
        key = (family, seed, dtype, max_shard_size, has_windows, tokenizer)
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            save_tiny(
                family,
                folder,
                seed=seed,
                dtype=dtype,
                max_shard_size=max_shard_size,
                has_windows=has_windows,
            )
            if tokenizer:
                tiny_tokenizer(folder)
            made[key] = folder
        return made[key]

    return save


@pytest.fixture(scope="session")
def builtin_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the built-in model prepared as `nested`, once a session. Read only.

    MIRA_TEST_DATA_DIR names a folder that is kept and used again.
    """
    kept = os.environ.get("MIRA_TEST_DATA_DIR")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("builtin-data")
    subprocess.run(
        [sys.executable, "-m", "mira_app.cli", "prepare", "builtin", "--no-predictors", "--plain"],
        env=os.environ | {"MIRA_CHAT_DATA_DIR": str(folder)},
        check=True,
    )
    return folder


@pytest.fixture(scope="session")
def native_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the built library of C++ kernels. Compiled steps may be added."""
    from mira_kernels import native

    if native.compiler() is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("native")
    status = native.build(folder)
    assert status.is_available, status.reason
    return folder


_NATIVE_FIXTURES = {"native_cache", "native_kernels"}


@pytest.fixture(autouse=True)
def _native_only_where_asked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hides kernels that an earlier test loaded from tests that do not ask for them.

    Up to how many rows they multiply is as it was before, too, when a test ends.
    """
    dispatch = sys.modules.get("mira_kernels.dispatch")
    if dispatch is not None:
        monkeypatch.setattr(dispatch, "_native_limits", dict(dispatch._native_limits))
    native = sys.modules.get("mira_kernels.native")
    if native is not None and not _NATIVE_FIXTURES & set(request.fixturenames):
        monkeypatch.setattr(native, "_loaded", None)
