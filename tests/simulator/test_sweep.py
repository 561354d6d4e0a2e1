"""`mira-chat simulate`: what it compares, what it refuses, and what it does not load."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from mira_app.simulation import run_simulation
from mira_engine.api import ConfigError, SimulationRequest, TraceError, simulate
from mira_engine.simulator.synthetic import synthetic_trace
from mira_engine.simulator.systems import all_systems


@pytest.fixture
def arrays(tmp_path):
    """A small trace as arrays."""
    trace = synthetic_trace(num_layers=3, num_experts=16, top_k=2, num_tokens=96, text_length=24)
    path = tmp_path / "small.npz"
    np.savez(path, ids=trace.ids, seq_len=np.array(trace.lengths))
    return path


def test_comparison_has_a_row_for_every_link_cache_and_system(arrays):
    request = SimulationRequest(
        trace_path=str(arrays), slots_per_layer=(2, 4), link_rates=(1e9, 4e9), record_bytes=10**6
    )
    told = []
    report = simulate(request, told.append)
    assert report.rows == tuple(told)
    names = [system.name for system in all_systems()]
    assert [row.policy for row in report.rows] == names * 4
    assert (report.num_layers, report.num_experts, report.top_k) == (3, 16, 2)
    by_key = {(r.policy, r.slots_per_layer, r.link_bytes_per_s): r for r in report.rows}
    slow, fast = by_key["lru", 4, 1e9], by_key["lru", 4, 4e9]
    assert slow.hit_rate == fast.hit_rate
    assert slow.tpot_s > fast.tpot_s
    assert by_key["belady", 4, 1e9].hit_rate >= slow.hit_rate
    assert by_key["lru", 2, 1e9].hit_rate <= slow.hit_rate
    assert simulate(request) == report


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ("lru", "magic")}, "magic"),
        ({"slots_per_layer": (0,)}, "slots per layer"),
        ({"slots_per_layer": (17,)}, "1 to 16"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"resident_s": 0}, "resident"),
        ({"num_tokens": 0}, "num tokens"),
        ({"link_rates": ()}, "no link"),
        ({"link_rates": (0.0,)}, "link rate"),
    ],
)
def test_request_that_cannot_be_simulated_is_refused(arrays, fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate(SimulationRequest(**({"trace_path": str(arrays)} | fields)))


def test_traces_of_different_models_are_refused(arrays, tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, ids=np.zeros((4, 2, 2), dtype=np.uint8), seq_len=np.array([4]))
    with pytest.raises(ConfigError, match="different models"):
        simulate(SimulationRequest(trace_path=str(arrays), training_path=str(other)))
    with pytest.raises(TraceError, match="cannot be read"):
        simulate(SimulationRequest(trace_path=str(tmp_path / "missing.npz")))


def test_table_says_the_same_as_json(arrays):
    flags = {
        "trace": str(arrays), "policy": ["lru", "mira+lookahead"], "slots_per_layer": [4],
        "link_rate": ["2GB"], "record": "1MB", "resident_ms": 5.0, "k": 3, "acceptance": None,
    }  # fmt: skip
    text, plain = io.StringIO(), io.StringIO()
    run_simulation(flags, is_json=False, out=text, err=io.StringIO())
    report = run_simulation(flags, is_json=True, out=plain, err=io.StringIO())
    rows = json.loads(plain.getvalue())["rows"]
    assert [row["policy"] for row in rows] == ["lru", "mira+lookahead"]
    assert rows[0]["link_bytes_per_s"] == 2e9
    printed = text.getvalue()
    assert "link 2 GB/s" in printed
    for row in report.rows:
        assert f"{row.hit_rate:.3f}" in printed
        assert f"{1e3 * row.tpot_s:.1f} ms" in printed


def test_command_loads_no_torch(arrays, repository):
    code = (
        "import sys; from mira_app.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end\n"
        "assert 'torch' not in sys.modules and 'numpy' in sys.modules"
    )
    path = os.pathsep.join(
        str(repository / root) for root in ("app", "engine", "kernels", "assets")
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", "--trace", arrays, "--json", "--policy", "lru",
         "--policy", "belady", "--slots-per-layer", "2"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [row["policy"] for row in json.loads(done.stdout)["rows"]] == ["lru", "belady"]
