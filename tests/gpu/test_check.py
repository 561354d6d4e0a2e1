"""The script for a card also runs where there is none, as far as that goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")


def test_check_runs_without_a_card_and_says_so(tmp_path: Path) -> None:
    script = Path(__file__).with_name("check.py")
    done = subprocess.run(
        [sys.executable, str(script), "--tokens", "4", "--json", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    if report["card"] is None:
        assert "interpreter" in done.stdout
        assert "kernels" not in report
    assert set(report["errors"]) >= {"bf16", "int8", "int4", "nested"}
    assert all(figures["hit_rate"] > 0 for figures in report["decoding"].values())
