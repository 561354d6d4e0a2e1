"""The picture of the expert cache as cells: folded to the room there is, one mark each. Pure.

A mark tells region and use without any colour: the longer an expert stays, and the busier it
is, the darker it is drawn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mira_engine.api import ResidencySample

HOT, STAGE, LOADING, ABSENT = "HSs."
_BUSY = "3"
"""Heat from which on an expert counts as busy: a third of the busiest one's tokens."""

MARKS = {
    (HOT, True): "█", (HOT, False): "▓", (STAGE, True): "▒", (STAGE, False): "░",
    (LOADING, True): "+", (LOADING, False): "+", (ABSENT, True): "x", (ABSENT, False): "·",
}  # fmt: skip
"""Mark by region and whether it is busy."""

SHADES = "█▓▒░"

NAMES = {"█▓": "HOT", "▒░": "STAGE", "+": "loading", "·": "away", "x": "away, though busy"}
"""What the marks mean; of two the first is the busy one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMap:
    """A picture folded to some room.

    Attributes:
        num_layers: Layers of the model.
        num_experts: Experts of a layer.
        layers_per_row: Layers that share a row.
        experts_per_cell: Experts of a layer that share a cell.
        regions: A row a group of layers, a character a cell: where most of its experts are.
        heat: As many digits: the busiest expert of each cell.
    """

    num_layers: int
    num_experts: int
    layers_per_row: int
    experts_per_cell: int
    regions: tuple[str, ...]
    heat: tuple[str, ...]

    @property
    def num_columns(self) -> int:
        """Cells of a row."""
        return len(self.regions[0]) if self.regions else 0

    @property
    def scale(self) -> str:
        """Says what a cell is, for people."""
        cells = f"{self.num_layers} layers down, {self.num_experts} experts across"
        if self.layers_per_row == self.experts_per_cell == 1:
            return cells
        return f"{cells}; a cell is {self.layers_per_row} x {self.experts_per_cell}"


def fold(sample: ResidencySample, num_columns: int, num_rows: int) -> CacheMap:
    """Folds a picture into at most so many cells; of each the majority shows.

    Of regions with equally many experts the longer-lived one shows.
    """
    num_layers = len(sample.regions)
    num_experts = len(sample.regions[0]) if sample.regions else 0
    down = max(1, -(-num_layers // max(1, num_rows)))
    across = max(1, -(-num_experts // max(1, num_columns)))
    regions, heat = sample.regions, sample.heat
    if down > 1 or across > 1:
        regions = _folded(sample.regions, down, across, _majority)
        heat = _folded(sample.heat, down, across, max)
    return CacheMap(
        num_layers=num_layers,
        num_experts=num_experts,
        layers_per_row=down,
        experts_per_cell=across,
        regions=regions,
        heat=heat,
    )


def marks(regions: str, heat: str) -> str:
    """Returns the marks of a row."""
    return "".join(
        MARKS[region, digit >= _BUSY] for region, digit in zip(regions, heat, strict=True)
    )


def _majority(cell: str) -> str:
    counts = Counter(cell)
    return max((HOT, STAGE, LOADING, ABSENT), key=lambda region: counts[region])


def _folded(rows: tuple[str, ...], down: int, across: int, choose) -> tuple[str, ...]:
    folded = []
    for top in range(0, len(rows), down):
        group = rows[top : top + down]
        cells = range(0, len(group[0]), across)
        folded.append(
            "".join(choose("".join(row[left : left + across] for row in group)) for left in cells)
        )
    return tuple(folded)


def counts(sample: ResidencySample) -> tuple[int, int, int, int]:
    """Returns how many experts are HOT, STAGE, loading and away."""
    whole = Counter("".join(sample.regions))
    return whole[HOT], whole[STAGE], whole[LOADING], whole[ABSENT]
