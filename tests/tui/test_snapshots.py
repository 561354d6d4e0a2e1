"""How the screens look, at 80x24 and 120x40."""

from __future__ import annotations

import pytest
from app_scenes import Scene

SIZES = [(80, 24), (120, 40)]
SCENES = ["preparing", "streaming", "stopped", "broken", "help"]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", SCENES)
def test_screen_looks_as_before(snap_compare, name, size):
    scene = Scene(is_ready=name != "preparing")
    assert snap_compare(scene.app, terminal_size=size, run_before=getattr(scene, name))
