"""The table of graphics cards, for planning for a card that one does not have."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card of `gpus.toml`, as its maker specifies it.

    Attributes:
        name: What `--machine` calls it.
        title: For people.
        memory_gib: Device memory.
        bandwidth_gb_per_s: Rate of that memory, in 10^9 bytes.
        pcie_generation: 3, 4 or 5.
        pcie_lanes: Lanes of the card.
        has_bfloat16: Whether it multiplies bfloat16.
    """

    name: str
    title: str
    memory_gib: int
    bandwidth_gb_per_s: float
    pcie_generation: int
    pcie_lanes: int
    has_bfloat16: bool = True


@functools.cache
def load_gpus() -> dict[str, Gpu]:
    """Reads the table, by name in its own order."""
    text = (importlib.resources.files("mira_assets") / "gpus.toml").read_text(encoding="utf-8")
    return {name: Gpu(name=name, **fields) for name, fields in tomllib.loads(text).items()}
