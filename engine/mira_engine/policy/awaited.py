"""What a pass waits for of its misses, those included that the processor computes. Pure.

A plan knows how many misses a pass has, not how they fall on its layers. They are taken to
fall at random, and each layer's are divided as `host_misses` does it when the model runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .host_misses import HostSetup, num_on_host

_LEAST_CHANCE = 1e-7
"""Numbers of misses that are less likely are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedMisses:
    """What a pass waits for, all layers together.

    Attributes:
        wait_s: Until the later of link and processor is done, layer by layer.
        num_on_link: Records that the link moves.
        num_on_host: Experts that the processor computes.
    """

    wait_s: float
    num_on_link: float
    num_on_host: float = 0.0

    @property
    def host_share(self) -> float:
        """Share of these misses that the processor computes."""
        num_misses = self.num_on_link + self.num_on_host
        return self.num_on_host / num_misses if num_misses else 0.0


def divided(
    num_misses: float,
    host: HostSetup,
    *,
    num_layers: int,
    num_choices: int,
    held_share: float,
    link_record_s: float,
    tokens_per_expert: float,
) -> AwaitedMisses:
    """Returns what a pass waits for where the processor takes its part.

    Args:
        num_misses: Expected, of all layers.
        host: Rates.
        num_layers: MoE layers.
        num_choices: Experts that a layer asks for.
        held_share: Of the experts, those whose records are in host memory.
        link_record_s: Seconds of the link for a record on average, those from the disk included.
        tokens_per_expert: Of an expert in the pass, on average.
    """
    host_s = host.expert_s + max(0.0, tokens_per_expert - 1.0) * host.token_s
    below_s = link_record_s
    if held_share < 1.0:
        below_s = (link_record_s - held_share * host.record_s) / (1.0 - held_share)
    chance = min(1.0, num_misses / (num_layers * num_choices))
    wait_s = on_link = on_host = 0.0
    for number in range(1, num_choices + 1):
        weight = math.comb(num_choices, number) * chance**number
        weight *= (1.0 - chance) ** (num_choices - number)
        if weight < _LEAST_CHANCE:
            continue
        for num_held, part in _held_of(number, held_share):
            num_below = number - num_held
            taken = num_on_host([host_s] * num_held, host.record_s, num_copied=num_below)
            link_s = (num_held - taken) * host.record_s + num_below * below_s
            wait_s += weight * part * max(taken * host_s, link_s)
            on_link += weight * part * (number - taken)
            on_host += weight * part * taken
    return AwaitedMisses(
        wait_s=num_layers * wait_s,
        num_on_link=num_layers * on_link,
        num_on_host=num_layers * on_host,
    )


def _held_of(number: int, share: float) -> tuple[tuple[int, float], ...]:
    """Returns the whole numbers around a share of misses, and how often each is meant."""
    fewest = int(number * share)
    rest = number * share - fewest
    return ((fewest, 1.0 - rest), (fewest + 1, rest)) if rest > 0.0 else ((fewest, 1.0),)
