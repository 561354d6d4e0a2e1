"""Products with two planes: the dense kernel's bits, a draft from the high plane alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mira_kernels import native
from mira_kernels.split import SplitWeight, join, join_draft, split
from native_weights import BF16, assert_close, num_threads, random, rng
from split_weights import KEPT, from_bits, has_same_bits, mixed, with_exceptions
from torch.nn import functional

ODD_SHAPES = ((1, 1), (1, 576), (3, 31), (33, 33), (130, 90), (65, 127), (7, 200), (64, 48))
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 31, 48)


def multiply(ops, x, planes, bias=None, is_draft=False):
    low = None if is_draft else planes.low
    return ops.split_linear(
        x,
        planes.high,
        low,
        planes.bases,
        planes.exceptions,
        planes.exception_values,
        bias,
    )


def take(ops, ids, planes):
    return ops.split_rows(
        ids,
        planes.high,
        planes.low,
        planes.bases,
        planes.exceptions,
        planes.exception_values,
    )


def weights():
    for shape in ODD_SHAPES:
        yield random(*shape)
        yield mixed(*shape)
    for name in ("tiny", "denormal", "a row of zeros", "zeros of both signs"):
        yield KEPT[name]
    yield KEPT["random"] * 1e-30
    yield KEPT["huge"] * 1e-3  # sums stay finite


def test_target_product_has_the_bits_of_the_dense_one(native_kernels):
    for weight in weights():
        planes = split(weight)
        num_outputs, num_inputs = weight.shape
        for num_rows in ROWS:
            x = random(num_rows, num_inputs, seed=num_rows)
            for bias in (None, random(num_outputs), random(num_outputs, dtype=torch.float32)):
                y = multiply(native_kernels, x, planes, bias)
                assert torch.equal(y, native_kernels.dense_linear(x, weight, bias))


def test_target_product_adds_exceptions(native_kernels):
    weight = with_exceptions()
    weight[:, 0] = weight[:, 89] = 0
    weight[0, 0], weight[33, 0], weight[69, 89] = 3e-12, -2e-12, 1e-12
    planes = split(weight)
    assert planes.exceptions.tolist() == [[0, 0], [33, 0], [33, 5], [33, 6], [69, 89]]
    for num_rows in (1, 5, 48, 60):
        x = random(num_rows, 90)
        y = multiply(native_kernels, x, planes)
        assert_close(y, x.double() @ weight.double().t(), 8e-3)
        x = torch.zeros(num_rows, 90, dtype=BF16)  # but where the other weights are zero
        x[:, 0] = 1 + torch.arange(num_rows)
        x[:, 89] = 2
        y = multiply(native_kernels, x, planes)
        assert_close(y, x.double() @ weight.double().t(), 8e-3)


def test_draft_product_agrees_with_the_high_plane(native_kernels):
    for weight in (*weights(), with_exceptions()):
        planes = split(weight)
        draft = join_draft(planes, 0, len(weight))
        for num_rows in ROWS:
            x, bias = random(num_rows, weight.shape[1], seed=num_rows), random(len(weight))
            y = multiply(native_kernels, x, planes, is_draft=True)
            truth = x.double() @ draft.double().t()
            assert_close(y, truth)
            y = multiply(native_kernels, x, planes, bias, is_draft=True)
            assert_close(y, truth + bias.double())


def test_draft_product_does_not_know_the_low_plane(native_kernels):
    planes = split(random(32, 64))
    other = SplitWeight(planes.high, planes.low ^ 0xFF, planes.bases, *rest(planes))
    x = random(3, 64)
    y = multiply(native_kernels, x, planes, is_draft=True)
    assert torch.equal(y, multiply(native_kernels, x, other, is_draft=True))
    assert not torch.equal(multiply(native_kernels, x, planes), multiply(native_kernels, x, other))


def rest(planes):
    return planes.exceptions, planes.exception_values


def test_the_lowest_byte_is_a_negative_weight(native_kernels):
    """0x80, -128 as a signed byte, is the sign of the smallest size and nothing else."""
    weight = from_bits(*(0x4300, 0xBF80) * 32).view(1, 64)  # 128, and -1 at its base
    planes = split(weight)
    assert planes.high[0, 1] == 0x80
    assert planes.bases.tolist() == [127]
    x = torch.eye(64, dtype=BF16)[1:2]
    assert multiply(native_kernels, x, planes).item() == -1
    assert multiply(native_kernels, x, planes, is_draft=True).item() == -1.03125


@pytest.mark.parametrize("is_draft", [False, True])
def test_every_byte_is_read_exactly(native_kernels, is_draft):
    weight = KEPT["every pattern of a byte"]
    planes = split(torch.cat((weight, -weight), 1))
    num_inputs = planes.shape[1]
    expected = (join_draft if is_draft else join)(planes, 0, 2)
    for first in range(0, num_inputs, 48):
        x = torch.eye(num_inputs, dtype=BF16)[first : first + 48]
        y = multiply(native_kernels, x, planes, is_draft=is_draft)
        assert torch.equal(y, expected.t()[first : first + 48])


@pytest.mark.parametrize("is_draft", [False, True])
def test_rows_have_the_same_bits_in_any_company(native_kernels, is_draft):
    for weight in (random(128, 160), random(65, 75), with_exceptions()):
        planes, x = split(weight), random(48, weight.shape[1])
        whole = multiply(native_kernels, x, planes, is_draft=is_draft)
        for num_rows in range(1, 49):
            part = multiply(native_kernels, x[48 - num_rows :], planes, is_draft=is_draft)
            assert torch.equal(part, whole[48 - num_rows :])


@pytest.mark.parametrize("is_draft", [False, True])
def test_products_have_the_same_bits_with_more_threads(native_kernels, is_draft):
    planes, x = split(random(1024, 576)), random(5, 576)
    results = []
    for count in (1, 2, 3):
        with num_threads(count):
            results.append(multiply(native_kernels, x, planes, is_draft=is_draft))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("is_draft", [False, True])
def test_more_rows_than_the_limit_agree_with_reference(native_kernels, is_draft):
    for weight in (random(700, 96), with_exceptions()):
        planes, num_inputs = split(weight), weight.shape[1]
        used = join_draft(planes, 0, len(weight)) if is_draft else weight
        x = random(native.MAX_ROWS + 7, num_inputs)
        for bias in (None, random(len(weight)), random(len(weight), dtype=torch.float32)):
            y = multiply(native_kernels, x, planes, bias, is_draft)
            truth = x.double() @ used.double().t()
            assert_close(y, truth if bias is None else truth + bias.double(), 8e-3)
        cube = x.view(5, 11, num_inputs)
        y = multiply(native_kernels, cube, planes, None, is_draft)
        assert_close(y, cube.double() @ used.double().t(), 8e-3)


def test_products_take_strided_leading_and_empty_axes(native_kernels):
    weight, strided = random(64, 96), random(4, 192)[:, ::2]
    planes = split(weight)
    truth = native_kernels.dense_linear(strided, weight, None)
    assert torch.equal(multiply(native_kernels, strided, planes), truth)
    y = multiply(native_kernels, strided.view(2, 2, 96), planes)
    assert torch.equal(y, truth.view(2, 2, 64))
    assert multiply(native_kernels, strided[:0], planes).shape == (0, 64)


def test_products_refuse_planes_that_do_not_fit(native_kernels):
    planes, x = split(with_exceptions()), random(1, 90)
    high, low, bases = planes.high, planes.low, planes.bases
    at, of = rest(planes)
    ops = native_kernels
    for arguments, message in (
        ((high.to(torch.int8), low, bases, at, of), "high has the wrong dtype"),
        ((high[:, ::2], low, bases, at, of), "weight must be"),
        ((high, low.t(), bases, at, of), "low must be"),
        ((high, low, bases[1:], at, of), "bases must be"),
        ((high, low, bases, at.flip(0), of), "exceptions must be sorted"),
        ((high, low, bases, at + 70, of), "exceptions must be sorted"),
        ((high, low, bases, at, of[1:]), "exceptions must be"),
        ((high, low, bases, at.long(), of), "exceptions has the wrong dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.split_linear(x, *arguments, None)
    with pytest.raises(RuntimeError, match="x must be"):
        multiply(ops, random(1, 89), planes)


# ---- rows --------------------------------------------------------------------------------


def test_rows_are_those_of_the_weight(native_kernels):
    for weight in (*weights(), with_exceptions()):
        planes = split(weight)
        ids = torch.randint(0, len(weight), (3, 4), generator=rng())
        for chosen in (ids, ids[0], ids.t(), ids[:0], ids[0, 0], torch.arange(len(weight))):
            y = take(native_kernels, chosen, planes)
            assert y.is_contiguous()
            assert y.dtype == BF16
            assert has_same_bits(y, functional.embedding(chosen, weight))


def test_rows_that_are_not_there_raise(native_kernels):
    planes = split(random(4, 8))
    for row in (-1, 4):
        with pytest.raises(RuntimeError, match="no such row"):
            take(native_kernels, torch.tensor([0, row]), planes)


# ---- tracing, and what other processors run -----------------------------------------------


def test_operators_pass_torch_checks(native_kernels):
    planes = split(with_exceptions())
    high, low, others = planes.high, planes.low, (planes.bases, *rest(planes))
    for name, arguments in (
        ("split_linear", (random(2, 90), high, low, *others, None)),
        ("split_linear", (random(2, 3, 90), high, None, *others, random(70))),
        ("split_rows", (torch.tensor([[1, 2], [69, 0]]), high, low, *others)),
    ):
        operator = getattr(native_kernels, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_portable_loops_read_planes_alike(native_cache, tmp_path):
    """What processors without AVX-512 run, built without its instructions."""
    library = tmp_path / "portable.so"
    assert native._compile(native.compiler(), library, ("-DMIRA_PORTABLE",)).is_available
    code = (
        "import sys, torch; from pathlib import Path; from mira_kernels import native, split\n"
        "print(native._load_file(Path(sys.argv[1])))\n"
        "g = torch.Generator().manual_seed(0)\n"
        "r = lambda *s: torch.randn(*s, generator=g).bfloat16()\n"
        "x, ops, good = r(48, 90), torch.ops.mira, []\n"
        "for w in (r(70, 90), r(70, 90) * torch.exp2(-torch.randint(0, 24, (70, 90))).bfloat16(),\n"
        "          r(70, 90) * 1e-37):\n"
        "    p = split.split(w)\n"
        "    f = lambda x, low: ops.split_linear(x, p.high, low, p.bases, p.exceptions,\n"
        "                                        p.exception_values, None)\n"
        "    y, d = f(x, p.low), f(x, None)\n"
        "    good += [torch.equal(f(x[n:], p.low), y[n:]) for n in range(48)]\n"
        "    good += [torch.equal(f(x[n:], None), d[n:]) for n in range(48)]\n"
        "    good.append(torch.equal(y, ops.dense_linear(x, w, None)))\n"
        "    t = x.double() @ split.join_draft(p, 0, 70).double().t()\n"
        "    good.append(bool((d.double() - t).norm() <= 4e-3 * t.norm()))\n"
        "print(len(good), all(good))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(native.__file__).parent.parent)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "NativeStatus(is_available=True, reason='')",
        "294 True",
    ]
