"""Every GPU kernel compiles for every architecture, without a GPU, and spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

MAX_REGISTERS = 232
"""A thread's; the most today is 227 (triton 3.9), and two blocks of 128 threads share a
multiprocessor with it."""

MAX_ALIGNED_REGISTERS = 128
"""As launched; the most today is 113 (triton 3.9), and four blocks share a multiprocessor."""

ARCHITECTURES = {"80", "86", "89", "90", "120"}

Table = dict[str, dict[str, dict[str, int]]]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """What kernels take, by name and architecture."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ahead_of_time.py"))],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_compile_for_every_architecture_within_their_registers(table: Table) -> None:
    everywhere = {name for name, built in table.items() if set(built) == ARCHITECTURES}
    assert everywhere >= {"up/int8", "down/nested", "draft-up/int4", "draft-down/int4"}
    for name, by_architecture in table.items():
        for architecture, used in by_architecture.items():
            assert used["spills"] == 0, (name, architecture, used)
            assert used["registers"] <= MAX_REGISTERS, (name, architecture, used)


def test_kernels_as_launched_take_fewer_registers_and_copy_codes_in_whole(table: Table) -> None:
    launched = {name: built for name, built in table.items() if name.startswith("aligned")}
    assert len(launched) == 7
    for name, by_architecture in launched.items():
        for architecture, used in by_architecture.items():
            assert used["registers"] <= MAX_ALIGNED_REGISTERS, (name, architecture, used)
            if "int8" not in name:  # There a tile of states is too small for more than 8 bytes.
                assert used["narrowest_copy"] == 16, (name, architecture, used)
