"""The processor's part beside a card: its outputs, their places, its errors, and the order."""

from __future__ import annotations

import threading
from types import MethodType

import pytest
import torch
from fake_queues import HOST, FakeQueues, RaceError
from mira_engine.checkpoint.formats import make_format
from mira_engine.errors import CancelledError, StoreError
from mira_engine.runtime import host_experts
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.host_experts import HostDemand, HostExperts, measure_host
from mira_engine.runtime.host_memory import PinnedSource, pageable
from mira_engine.runtime.streams import Lane
from mira_engine.types import ExpertId, ExpertShape, Plane, Precision
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

pytest.importorskip("triton", reason="triton has no wheel for this system")

from mira_kernels.assignments import group_by_expert
from mira_kernels.gpu_layer import Between
from mira_kernels.triton_experts import expert_outputs
from random_experts import NUM_EXPERTS, STORED, Layer, hidden_states, routing, worst_error

DEVICE = torch.device("cpu")
WAIT_S = 60.0
FORMS = {
    "silu": {},
    "gelu": {"between": Between.GELU_GATE},
    "clamped": {"between": Between.CLAMPED_GATE, "has_bias": True, "is_interleaved": True},
    "squared relu": {"between": Between.SQUARED_RELU},
    "biased": {"between": Between.SILU, "has_bias": True},
}
ACTS = {
    Between.SILU_GATE: "silu",
    Between.GELU_GATE: "gelu_pytorch_tanh",
    Between.SQUARED_RELU: "relu2",
    Between.SILU: "silu",
}


class FakeModule(torch.nn.Module):
    """An experts module without weights: what lies between the matrices is transformers'."""

    has_post_expert_norm = False

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.has_gate = layer.between.has_gate
        if layer.between is Between.CLAMPED_GATE:
            self.limit, self.alpha = layer.experts.limit, layer.experts.alpha
            self._apply_gate = MethodType(GptOssExperts._apply_gate, self)
            return
        self.act_fn = ACT2FN[ACTS[layer.between]]
        self._apply_gate = MethodType(moe._default_apply_gate, self)


class CheckedQueues(FakeQueues):
    """Checks what the host reads and writes of its staging memory, too."""

    def copy(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Copies; the source is read in the lane."""
        self.read(source, lane)
        super().copy(target, source, lane)

    def write(self, target: Tensor, lane: object = HOST) -> None:
        """The host writes its memory."""
        tick = self._put(lane)
        address = target.data_ptr()
        self._check(address, lane, self._reads.pop(address, {}), "written while it may be read")
        self._writes[address] = lane, tick


@pytest.fixture
def make_host():
    """Makes hosts, and ends their threads."""
    hosts: list[HostExperts] = []

    def make(layer: Layer, queues: FakeQueues | None = None, **others) -> HostExperts:
        made = HostExperts(
            others.get("fmt", layer.format),
            others.get("held", records_of(layer)),
            queues or CheckedQueues(),
            others.get("allocate", pageable),
            DEVICE,
        )
        hosts.append(made)
        return made

    yield make
    for each in hosts:
        each.close()


def records_of(layer: Layer):
    """Gives the layer's records as host memory would."""

    def held(expert: ExpertId) -> dict[Plane, Tensor]:
        return {
            plane: arena.data[slot * arena.record_bytes : (slot + 1) * arena.record_bytes]
            for plane, arena in layer.planes.items()
            for slot in [int(arena.table[expert.expert])]
        }

    return held


def demand_of(hidden: Tensor, chosen: Tensor, *experts: int) -> HostDemand:
    num_rows = chosen.numel()
    return HostDemand(
        hidden=hidden,
        flat_experts=chosen.reshape(-1).tolist(),
        outputs=torch.full((num_rows, hidden.shape[1]), float("nan"), dtype=hidden.dtype),
        experts=[ExpertId(0, expert) for expert in experts],
    )


def run(host: HostExperts, module: torch.nn.Module, demand: HostDemand) -> float:
    host.begin(module, demand)
    assert host.wait(WAIT_S)
    return host.place()


# -- what it computes -----------------------------------------------------------------------


@pytest.mark.parametrize("precision", STORED)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_the_kernels_and_go_to_their_rows(
    precision: Precision, form: str, make_host
) -> None:
    layer = Layer(precision, **FORMS[form])
    if layer.between is Between.CLAMPED_GATE:
        layer.experts = _clamped(layer)
    hidden, chosen = hidden_states(7, 96), routing(7)
    kernels = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))
    demand = demand_of(hidden, chosen, 1, 4)

    seconds = run(make_host(layer), FakeModule(layer), demand)

    mine = torch.isin(chosen.reshape(-1), torch.tensor([1, 4]))
    assert worst_error(demand.outputs[mine], kernels[mine].double()) < 1e-5
    assert demand.outputs[~mine].isnan().all(), "the other rows are somebody else's"
    assert seconds > 0


def _clamped(layer: Layer):
    from dataclasses import replace

    return replace(layer.experts, limit=0.7, alpha=1.702)


@pytest.mark.parametrize("precision", STORED)
def test_outputs_in_bfloat16_are_near_the_truth(precision: Precision, make_host) -> None:
    layer = Layer(precision)
    hidden, chosen = hidden_states(5, 96, torch.bfloat16), routing(5)
    demand = demand_of(hidden, chosen, *range(NUM_EXPERTS))

    run(make_host(layer), FakeModule(layer), demand)

    assert worst_error(demand.outputs, layer.outputs(hidden, chosen)) < 3e-2


def test_layers_follow_each_other_in_the_same_staging_memory(make_host) -> None:
    layer = Layer(Precision.INT8)
    host, module = make_host(layer), FakeModule(layer)
    for number in (9, 3, 12, 1):
        hidden, chosen = hidden_states(number, 96), routing(number, seed=number)
        demand = demand_of(hidden, chosen, *range(NUM_EXPERTS))
        run(host, module, demand)
        assert worst_error(demand.outputs, layer.outputs(hidden, chosen)) < 1e-5


def test_memory_that_cannot_be_pinned_is_ordinary(make_host) -> None:
    def refuse(num_bytes: int) -> Tensor:
        raise RuntimeError("out of pinned memory")

    layer = Layer(Precision.BF16)
    hidden, chosen = hidden_states(2, 96), routing(2)
    demand = demand_of(hidden, chosen, *range(NUM_EXPERTS))

    run(make_host(layer, allocate=refuse), FakeModule(layer), demand)

    assert worst_error(demand.outputs, layer.outputs(hidden, chosen)) < 1e-5


# -- beside everything else -----------------------------------------------------------------


def test_engine_goes_on_while_the_host_computes(make_host) -> None:
    layer, gate = Layer(Precision.BF16), threading.Event()
    give = records_of(layer)

    def held(expert: ExpertId):
        assert gate.wait(WAIT_S)
        return give(expert)

    host = make_host(layer, held=held)
    host.begin(FakeModule(layer), demand_of(hidden_states(2, 96), routing(2), 0, 1))
    assert host.is_busy
    assert not host.wait(0.0)
    gate.set()
    assert host.wait(WAIT_S)
    host.place()
    assert not host.is_busy


def test_error_in_the_thread_reaches_the_engine_and_the_next_layer_works(make_host) -> None:
    layer, damaged = Layer(Precision.BF16), [True]
    give = records_of(layer)

    def held(expert: ExpertId):
        if damaged:
            damaged.pop()
            raise StoreError("a damaged record", hint="prepare again")
        return give(expert)

    host, module = make_host(layer, held=held), FakeModule(layer)
    hidden, chosen = hidden_states(2, 96), routing(2)
    host.begin(module, demand_of(hidden, chosen, 0))
    assert host.wait(WAIT_S)
    with pytest.raises(StoreError, match="damaged"):
        host.place()

    demand = demand_of(hidden, chosen, *range(NUM_EXPERTS))
    run(host, module, demand)

    assert worst_error(demand.outputs, layer.outputs(hidden, chosen)) < 1e-5


def test_layer_that_was_broken_off_is_waited_for_and_forgotten(make_host) -> None:
    layer = Layer(Precision.BF16)
    host = make_host(layer)
    abandoned = demand_of(hidden_states(2, 96), routing(2), 0)
    host.begin(FakeModule(layer), abandoned)
    with pytest.raises(AssertionError, match="left without a word"):
        host.begin(FakeModule(layer), abandoned)

    host.settle()

    assert not host.is_busy
    assert abandoned.outputs.isnan().all()


def test_host_memory_is_written_only_when_the_lane_has_read_it(make_host, monkeypatch) -> None:
    """The tokens come and the results go in the compute lane; the host waits for both."""
    layer, queues = Layer(Precision.BF16), CheckedQueues(lambda: False)
    host, module = make_host(layer, queues), FakeModule(layer)

    def run_checked(number: int) -> None:
        hidden, chosen = hidden_states(number, 96), routing(number)
        host.begin(module, demand_of(hidden, chosen, *range(NUM_EXPERTS)))
        queues.read(host._staging["hidden"], HOST)
        queues.write(host._staging["results"])
        assert host.wait(WAIT_S)
        host.place()

    for number in (4, 2, 4):
        run_checked(number)
    monkeypatch.setattr(host._arrived, "wait", lambda: None)  # Planted: nobody waits.
    with pytest.raises(RaceError, match="read before its copy ends"):
        run_checked(4)
    host.settle()
    read = queues.read
    monkeypatch.setattr(queues, "read", lambda t, lane: None if lane is HOST else read(t, lane))
    with pytest.raises(RaceError, match="written while it may be read"):
        run_checked(4)


# -- how fast -------------------------------------------------------------------------------

SHAPE = ExpertShape(hidden_size=64, intermediate_size=32)


class FakeModuleOfSilu(FakeModule):
    """The plain form."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.has_gate = True
        self.act_fn = torch.nn.SiLU()
        self._apply_gate = MethodType(moe._default_apply_gate, self)


@pytest.fixture
def machine():
    """A host, a link with three slots and a source of twelve experts, of whom ten are held."""
    fmt = make_format(Precision.INT8, SHAPE)
    sizes = {Plane.WHOLE: fmt.record_bytes(Plane.WHOLE)}
    experts = [ExpertId(layer, expert) for layer in range(3) for expert in range(4)]
    chunk = torch.zeros(10 * sizes[Plane.WHOLE], dtype=torch.uint8)
    source = PinnedSource([chunk], experts, sizes, lambda *_: None)
    queues = CheckedQueues()
    slots = [{Plane.WHOLE: torch.zeros(sizes[Plane.WHOLE], dtype=torch.uint8)} for _ in range(3)]
    transfer = CudaTransfer(queues, source, slots)
    host = HostExperts(fmt, source.held, queues, pageable, DEVICE)
    yield host, transfer, source
    host.close()
    transfer.close()


def measure(machine, **others):
    host, transfer, source = machine
    arguments = {"held": source.experts, "is_cancelled": lambda: False} | others
    held = arguments.pop("held")
    return measure_host(
        host, transfer, FakeModuleOfSilu(), SHAPE, torch.bfloat16, held, **arguments
    )


def test_rates_are_measured_on_held_records_and_the_link_is_left_empty(machine) -> None:
    _, transfer, source = machine

    setup = measure(machine)

    assert setup.num_held == 10 == len(source.experts)
    assert setup.expert_s > 0
    assert setup.token_s >= 0
    assert setup.record_s > 0
    assert transfer.poll() == []
    assert len(transfer._queues.copies) == 2 * 3, "as many at a time as there are slots"


def test_emulated_link_is_taken_at_its_word(machine) -> None:
    _, transfer, _ = machine
    transfer.limit_rate(1000.0)

    assert measure(machine).record_s == transfer.record_bytes / 1000.0
    assert not transfer._queues.copies


def test_slow_host_is_measured_once(machine, monkeypatch) -> None:
    monkeypatch.setattr(host_experts, "_SLOW_S", 0.0)
    calls = []
    time_s = HostExperts.time_s

    def counted(self, *arguments) -> float:
        calls.append(arguments)
        return time_s(self, *arguments)

    monkeypatch.setattr(HostExperts, "time_s", counted)

    setup = measure(machine)

    assert len(calls) == 1
    assert setup.token_s == 0.0


def test_nothing_is_measured_where_nothing_is_held(machine) -> None:
    assert measure(machine, held=[]) is None


def test_measuring_ends_when_somebody_asks_to_stop(machine) -> None:
    with pytest.raises(CancelledError):
        measure(machine, is_cancelled=lambda: True)
