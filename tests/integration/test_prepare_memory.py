"""What memory a preparation takes, by the bench at a small size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "prepare_memory.py"
SHAPE = {"layers": 4, "hidden": 512, "experts": 32, "width": 384, "vocabulary": 2000}
SHARD_MB = 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_prepare_grows_by_less_than_a_layer_and_the_disk_by_what_was_promised(tmp_path):
    options = [f"--{name}={value}" for name, value in SHAPE.items()]
    command = [
        sys.executable, str(BENCH), "--folder", str(tmp_path), "--ways", "deleted", "--warm",
        f"--shard-mb={SHARD_MB}", *options,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    # Of four layers of 38 MB; some 28 MB are the client's and the allocator's, so that a
    # whole shard of 20 MB in memory would show.
    assert found["deleted"]["growth_bytes"] < found["layer_bytes"]
    assert abs(found["deleted"]["disk_error"]) < 0.02
