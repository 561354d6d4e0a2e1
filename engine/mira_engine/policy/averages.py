"""A mean that follows what it measures: the estimate behind chunk sizes and K. Pure."""

from __future__ import annotations


class MovingAverage:
    """Exponential moving average that begins as a plain mean.

    Args:
        weight: Share of a new value once there are `1 / weight` of them. Before, all values
            count alike, so that the first one has no lasting say.
    """

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._value = 0.0
        self.num_values = 0

    @property
    def value(self) -> float | None:
        """The average, `None` before the first value."""
        return self._value if self.num_values else None

    def add(self, value: float) -> None:
        """Takes a value in."""
        self.num_values += 1
        share = max(self._weight, 1 / self.num_values)
        self._value += share * (value - self._value)

    def reset(self) -> None:
        """Forgets all values."""
        self._value, self.num_values = 0.0, 0
