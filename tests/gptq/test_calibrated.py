"""What reaches an expert's matrices is what transformers' own experts see."""

import pytest
import torch
from mira_engine.checkpoint.experts import CheckpointExperts, expert_modules_of
from mira_engine.checkpoint.gptq_calibrated import CalibratedCodes, MatrixCodes, working_bytes
from mira_engine.predictor.traces import RoutingTrace, TraceFolder
from mira_engine.types import ExpertShape
from transformers import AutoModelForCausalLM

GROUP, NUM_TOKENS = 32, 700


class FakeQuantiser:
    """Keeps what it is given; `fails_at` counts calls."""

    def __init__(self, fails_at=None):
        self.calls = []
        self._fails_at = fails_at

    def __call__(self, weight, batches):
        batches = list(batches)
        self.calls.append((weight, torch.cat(batches), len(batches)))
        if len(self.calls) == self._fails_at:
            return None
        scales = torch.ones(weight.shape[0], weight.shape[1] // GROUP)
        return MatrixCodes(torch.zeros(weight.shape, dtype=torch.int8), scales)


@pytest.fixture
def recorded(tiny_checkpoint, tmp_path):
    """`(family)` to a checkpoint and a recording of random states; expert 0 is never chosen."""

    def make(family, num_tokens=NUM_TOKENS):
        checkpoint = CheckpointExperts(tiny_checkpoint(family))
        generator = torch.Generator().manual_seed(1)
        num_layers, num_experts = len(checkpoint.modules), checkpoint.num_experts
        ids = torch.stack(
            [
                1 + torch.randperm(num_experts - 1, generator=generator)[:2]
                for _ in range(num_tokens * num_layers)
            ]
        ).view(num_tokens, num_layers, 2)
        size = checkpoint.shape.hidden_size
        hidden = [
            torch.randn(num_tokens, size, generator=generator).to(torch.float16)
            for _ in range(num_layers)
        ]
        trace = RoutingTrace(
            ids=ids.to(torch.int16),
            weights=torch.ones(ids.shape, dtype=torch.float16),
            sequence=torch.zeros(num_tokens, dtype=torch.int32),
            is_reply=torch.zeros(num_tokens, dtype=torch.bool),
        )
        folder = TraceFolder(tmp_path / family)
        half = num_tokens // 2  # Two parts, as a recording has several.
        for part, rows in enumerate((slice(None, half), slice(half, None))):
            piece = RoutingTrace(
                ids=trace.ids[rows],
                weights=trace.weights[rows],
                sequence=trace.sequence[rows],
                is_reply=trace.is_reply[rows],
            )
            folder.write_part(part, piece, [states[rows] for states in hidden])
        return checkpoint, folder, ids, hidden

    return make


def chooser_of(checkpoint, folder, quantise):
    return CalibratedCodes(checkpoint, folder, group_size=GROUP, quantise=quantise)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_matrices_see_what_transformers_experts_see(recorded, family):
    """Gated, interleaved with biases, and without a gate."""
    checkpoint, folder, ids, hidden = recorded(family)
    layer, expert = 1, 2
    quantise = FakeQuantiser()
    chosen = chooser_of(checkpoint, folder, quantise).choose(
        layer, expert, checkpoint.load(layer, expert)
    )
    assert chosen.group_size == GROUP

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, experts_implementation="eager"
    )
    module = expert_modules_of(model)[layer][1]
    rows = (ids[:, layer] == expert).any(dim=1)
    inputs = hidden[layer][rows].float()
    index = torch.full((len(inputs), 1), expert)
    with torch.inference_mode():
        expected = module.forward(inputs, index, torch.ones(len(inputs), 1))
    (first, given, _), (second, inner, _) = quantise.calls
    assert 0 < len(inputs) < NUM_TOKENS
    assert torch.equal(given, inputs)
    wanted = checkpoint.load(layer, expert)
    result = torch.nn.functional.linear(inner, second, wanted.down_bias)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(first, wanted.up)
    assert torch.equal(second, wanted.down)


def test_inputs_pass_in_batches(recorded):
    checkpoint, folder, ids, _ = recorded("mixtral", num_tokens=2000)
    quantise = FakeQuantiser()
    chooser_of(checkpoint, folder, quantise).choose(0, 1, checkpoint.load(0, 1))
    num_rows = int((ids[:, 0] == 1).any(dim=1).sum())
    assert [len(rows) for _, rows, _ in quantise.calls] == [num_rows, num_rows]
    assert [batches for *_, batches in quantise.calls] == [-(-num_rows // 512)] * 2
    assert num_rows > 512


def test_expert_that_nothing_reached_has_no_codes(recorded):
    checkpoint, folder, *_ = recorded("mixtral")
    quantise = FakeQuantiser()
    assert chooser_of(checkpoint, folder, quantise).choose(0, 0, checkpoint.load(0, 0)) is None
    assert quantise.calls == []


@pytest.mark.parametrize("fails_at", [1, 2])
def test_expert_whose_matrix_fails_has_no_codes(recorded, fails_at):
    checkpoint, folder, *_ = recorded("mixtral")
    quantise = FakeQuantiser(fails_at)
    assert chooser_of(checkpoint, folder, quantise).choose(0, 1, checkpoint.load(0, 1)) is None
    assert len(quantise.calls) == fails_at


def test_states_beyond_float16_are_left_out(recorded, tmp_path):
    checkpoint, folder, ids, hidden = recorded("mixtral")
    row = int((ids[:, 0] == 1).any(dim=1).nonzero()[0])
    hidden[0][row, 3] = torch.inf
    broken = TraceFolder(tmp_path / "broken")
    broken.write_part(0, folder.routing(), hidden)
    quantise = FakeQuantiser()
    chooser_of(checkpoint, broken, quantise).choose(0, 1, checkpoint.load(0, 1))
    num_rows = int((ids[:, 0] == 1).any(dim=1).sum())
    assert len(quantise.calls[0][1]) == num_rows - 1
    assert all(torch.isfinite(rows).all() for _, rows, _ in quantise.calls)


def test_working_bytes_hold_one_matrix_however_many_experts_there_are():
    shape = ExpertShape(hidden_size=2048, intermediate_size=1408)
    alone = working_bytes(shape, max_input_bytes=0)
    assert 4 * 4 * 2048**2 < alone < 300e6
    assert working_bytes(shape, max_input_bytes=10**6) == alone + 4 * 10**6
