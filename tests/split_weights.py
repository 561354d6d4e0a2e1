"""Dense weights that are hard on their two planes: odd shapes, far exponents, every bit."""

from __future__ import annotations

import torch
from mira_kernels.split import join
from native_weights import BF16, random, rng


def from_bits(*bits):
    """Makes bfloat16 numbers of their bits."""
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(BF16)


def mixed(num_outputs, num_inputs, spread=28, seed=0):
    """Weights whose exponents differ by up to `spread` within a row."""
    powers = torch.randint(0, spread + 1, (num_outputs, num_inputs), generator=rng(seed))
    return (random(num_outputs, num_inputs, seed=seed).sign() * torch.exp2(-powers.float())).to(
        BF16
    ) * 1.5


def with_exceptions(num_outputs=70, num_inputs=90):
    """Draws weights of which five are too near to zero for the planes."""
    weight = random(num_outputs, num_inputs)
    for row, column in ((0, 0), (0, 89), (33, 5), (33, 6), (69, 89)):
        weight[row, column] = -3e-13 * (column + 1)
        weight[row, 40] = 4.0
    return weight


def has_same_bits(a, b):
    """Compares bits: zeros have signs."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def all_of(planes):
    """Joins all rows."""
    return join(planes, 0, planes.shape[0])


KEPT = {
    "random": random(130, 90),
    "tiny": random(33, 48) * 1e-37,
    "denormal": from_bits(1, 0x807F, 0x7F, 0, 0x8000, 0x80, 0x8001, 0x700).view(2, 4),
    "huge": random(33, 48) * 5e37,
    "largest": from_bits(0x7F7F, 0xFF7F, 0x7F00, 0).view(2, 2),
    "zeros": torch.zeros(3, 50, dtype=BF16),
    "a row of zeros": random(4, 50) * torch.tensor([[1], [0], [1], [1]]),
    "zeros of both signs": torch.cat((random(2, 4), -torch.zeros(2, 4), torch.zeros(2, 4)), 1).to(
        BF16
    ),
    "mixed": mixed(64, 200),
    "every pattern of a byte": from_bits(*range(0x3880, 0x4000)).repeat(2, 1) * 1.0,
    "one": torch.ones(1, 1, dtype=BF16),
    "no inputs": torch.empty(3, 0, dtype=BF16),
    "no outputs": torch.empty(0, 3, dtype=BF16),
    "strided": random(60, 90)[::2, ::3],
}
"""Weights of which the planes keep all without exceptions."""
