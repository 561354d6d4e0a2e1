"""GPTQModel itself: its codes beat rounding to nearest, and a whole draft is made of them.

Run by `make test-gptq`, which installs it beside the environment of the other tests.
"""

import pytest
import torch
from mira_engine.checkpoint import quantise
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.store import ExpertStore, StoreManifest
from mira_engine.types import Precision, Rounding

pytestmark = [
    pytest.mark.gptq,
    # The library's own, and those of what it imports.
    pytest.mark.filterwarnings("ignore"),
]

GROUP = 64


@pytest.fixture(scope="module")
def make_quantiser():
    import os

    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from mira_engine.checkpoint.gptq_core import make_quantiser

    return make_quantiser


def correlated(num_rows, num_columns, seed=0):
    """Inputs that vary in few directions, as hidden states do."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(num_rows, num_columns // 8, generator=generator)
    spread = torch.randn(num_columns // 8, num_columns, generator=generator)
    return few @ spread + 0.1 * torch.randn(num_rows, num_columns, generator=generator)


def relative_error(inputs, weight, approximation):
    wanted = inputs @ weight.T
    return float((inputs @ approximation.T - wanted).norm() / wanted.norm())


def test_codes_err_less_than_rounding_to_nearest_on_inputs_not_seen(make_quantiser):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 256, generator=generator) * 0.05
    inputs = correlated(2048, 256)
    chosen = make_quantiser(GROUP)(weight.clone(), inputs[:1024].split(256))
    assert chosen.codes.dtype == torch.int8
    assert chosen.codes.shape == weight.shape
    assert chosen.scales.shape == (96, 4)
    assert int(chosen.codes.min()) >= -8
    assert int(chosen.codes.max()) <= 7
    assert int(chosen.codes.abs().max()) >= 7
    made = chosen.codes * chosen.scales.to(torch.bfloat16).float().repeat_interleave(GROUP, dim=1)
    nearest = quantise.quantise_int4(weight, GROUP)
    rounded = nearest.codes * nearest.scales.float().repeat_interleave(GROUP, dim=1)
    unseen = inputs[1024:]
    assert relative_error(unseen, weight, made) < 0.75 * relative_error(unseen, weight, rounded)


def test_matrix_with_few_inputs_is_quantised_all_the_same(make_quantiser):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(32, 128, generator=generator)
    chosen = make_quantiser(GROUP)(weight.clone(), [torch.randn(1, 128, generator=generator)])
    made = chosen.codes * chosen.scales.repeat_interleave(GROUP, dim=1)
    assert float((made - weight).norm() / weight.norm()) < 0.3


def test_weight_that_is_given_stays_as_it_is(make_quantiser):
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    before = weight.clone()
    make_quantiser(GROUP)(weight, correlated(256, 128).split(128))
    assert torch.equal(weight, before)


def test_draft_of_a_model_is_made_in_a_process_of_its_own(home_of, make):
    home = home_of("qwen3_moe", Precision.INT8)
    nearest = ExpertStore.open(home.store_dir(Precision.INT4)).manifest
    make(home, Precision.INT8)
    found = StoreManifest.from_file(home.store_dir(Precision.INT4) / MANIFEST_FILE)
    assert found.rounding is Rounding.GPTQ
    assert found.files.keys() == nearest.files.keys()
    assert any(found.files[name] != nearest.files[name] for name in found.files)
    ExpertStore.open(home.store_dir(Precision.INT4)).verify()
