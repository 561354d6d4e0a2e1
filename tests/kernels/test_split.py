"""Dense weights in two planes: nothing lost, and a draft from one plane."""

from __future__ import annotations

import weakref

import pytest
import torch
from mira_kernels.split import MAX_EXCEPTIONS, join, join_draft, split
from native_weights import BF16, random
from split_weights import KEPT, all_of, from_bits, has_same_bits, mixed, with_exceptions
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize("name", KEPT)
def test_split_keeps_every_bit(name):
    weight = KEPT[name]
    planes = split(weight)
    assert planes.shape == tuple(weight.shape)
    assert len(planes.exceptions) == len(planes.exception_values) == 0
    assert has_same_bits(all_of(planes), weight)
    for part in (planes.high, planes.low, planes.bases, planes.exceptions):
        assert part.is_contiguous()


def test_split_lists_what_is_too_near_to_zero():
    weight = with_exceptions()
    planes = split(weight)
    assert planes.exceptions.tolist() == [[0, 0], [0, 89], [33, 5], [33, 6], [69, 89]]
    row, column = planes.exceptions.long().unbind(1)
    assert torch.equal(planes.exception_values, weight[row, column].float())
    assert bool((planes.high[row, column] == 0).all())
    assert bool((planes.low[row, column] == 0xF8).all())
    assert has_same_bits(all_of(planes), weight)
    assert has_same_bits(join(planes, 33, 40), weight[33:40])
    denormal = from_bits(0x3F80, 1, 0x8002).view(1, 3)
    assert has_same_bits(all_of(split(denormal)), denormal)


def test_split_is_exact_to_the_last_step_below_the_base():
    weight = from_bits(*((127 - below) << 7 | 0x55 for below in range(39))).view(1, 39)
    planes = split(weight)
    assert planes.bases.tolist() == [120]
    assert (planes.low >> 3).tolist() == [[0] * 8 + list(range(1, 31)) + [31]]
    assert planes.exceptions.tolist() == [[0, 38]]
    assert has_same_bits(all_of(planes), weight)


def test_split_leaves_dense_what_does_not_fit():
    for value in (float("inf"), -float("inf"), float("nan")):
        weight = random(70, 90)
        weight[69, 89] = value
        assert split(weight) is None
    assert split(random(4, 4, dtype=torch.float32)) is None
    weight = torch.full((3, 2049), 1e-12, dtype=BF16)
    weight[:, 0] = 1
    assert split(weight) is None
    weight[2, 1:] = 1
    planes = split(weight)
    assert len(planes.exceptions) == MAX_EXCEPTIONS
    assert has_same_bits(all_of(planes), weight)


def test_split_takes_a_parameter():
    weight = torch.nn.Parameter(random(5, 70))
    planes = split(weight)
    assert not planes.high.requires_grad
    assert has_same_bits(all_of(planes), weight.detach())


class Peak(TorchDispatchMode):
    """Counts bytes of storages that operators made and that still live."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result

    def forget(self, key, size):
        self.seen.discard(key)
        self.alive -= size


def test_split_holds_little_besides_its_result():
    for shape in ((4096, 1024), (8, 1 << 19), (2, 1 << 20)):
        weight = random(*shape)
        with Peak() as peak:
            planes = split(weight)
        assert has_same_bits(all_of(planes), weight)
        assert peak.peak - 2 * weight.numel() <= 32 << 20


def test_draft_is_near_the_weight():
    for weight in (random(64, 200), mixed(64, 200), KEPT["a row of zeros"], with_exceptions()):
        planes = split(weight)
        draft = join_draft(planes, 0, len(weight)).double()
        error, size = (draft - weight.double()).abs(), weight.double().abs()
        is_high = size >= torch.exp2(planes.bases[:, None].double() - 127)
        assert bool((error <= size / 32)[is_high].all())
        assert bool((error <= size.amax(1, keepdim=True) / 2**6).logical_or(is_high).all())
