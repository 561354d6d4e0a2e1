"""Every card is found, and every reason why torch cannot use it is named with its remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from mira_engine.errors import ConfigError
from mira_engine.events import MachineFact
from mira_engine.runtime.card_facts import accelerator_facts
from mira_engine.runtime.cards import (
    Card,
    CardSearch,
    SystemLimits,
    TorchBuild,
    dtype_on,
    find_cards,
    look_at_limits,
)
from mira_engine.runtime.host_system import HostKind, HostSystem
from mira_engine.types import ComputeDtype, FactMark

GIB = 1 << 30
CARD = Card(
    index=0,
    name="RTX 4090",
    total_bytes=24 * GIB,
    free_bytes=24 * GIB - 100,
    capability=(8, 9),
    link_generation=4,
    link_width=16,
    max_link_width=16,
)
SEARCH = CardSearch(cards=(CARD,), driver="580.95", cuda=(13, 0))
BUILD = TorchBuild(cuda="13.0", has_cuda_device=True)
LINUX = HostSystem(kind=HostKind.LINUX)
WSL = HostSystem(kind=HostKind.WSL)
WINDOWS = HostSystem(kind=HostKind.WINDOWS)


def _facts(
    search: CardSearch = SEARCH,
    build: TorchBuild = BUILD,
    limits: SystemLimits = SystemLimits(),  # noqa: B008 - frozen
    *,
    is_used: bool = True,
    host: HostSystem = LINUX,
) -> dict[str, MachineFact]:
    facts = accelerator_facts(search, build, limits, is_used=is_used, host=host)
    return {fact.code: fact for fact in facts}


def _with(**changes: object) -> CardSearch:
    return dataclasses.replace(SEARCH, cards=(dataclasses.replace(CARD, **changes),))


class FakeNvml:
    """NVIDIA's management library with two cards, one of which does not tell its link."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_MEM = 2

    def __init__(self, init_error: str = "") -> None:
        self.init_error = init_error
        self.is_shut = False

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.10"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"card {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=8 * GIB, free=(handle + 1) * GIB, used=0)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 8, 6

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_MEM
        return 7501

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 192


def test_cards_are_found_with_what_they_tell() -> None:
    nvml = FakeNvml()

    search = find_cards(nvml)

    assert [card.name for card in search.cards] == ["card 0", "card 1"]
    assert search.cuda == (12, 8)
    assert search.driver == "570.10"
    assert search.cards[0].link_width == 8
    assert search.cards[1].link_generation == 0
    assert search.cards[1].used_bytes == 6 * GIB
    assert search.cards[0].memory_bytes_per_s == pytest.approx(360e9, rel=0.01)
    assert search.cards[1].memory_bytes_per_s == 0.0
    assert nvml.is_shut


def test_search_without_a_driver_is_no_problem_and_with_a_broken_one_is() -> None:
    assert find_cards(FakeNvml("NVML Shared Library Not Found")) == CardSearch()
    broken = find_cards(FakeNvml("Driver/library version mismatch"))
    assert _facts(broken)["gpu"].mark is FactMark.PROBLEM
    assert "mismatch" in _facts(broken)["gpu"].text


def test_usable_card_is_described() -> None:
    fact = _facts()["gpu-0"]

    assert fact.mark is FactMark.OK
    assert "RTX 4090" in fact.text
    assert "24.0 GiB" in fact.text or "24 GiB" in fact.text


def test_card_that_this_version_does_not_use_says_so() -> None:
    assert "not used" in _facts(is_used=False)["gpu-0"].text


@pytest.mark.parametrize(
    ("search", "build", "text", "hint"),
    [
        (SEARCH, TorchBuild(), "without CUDA", "CUDA build"),
        (dataclasses.replace(SEARCH, cuda=(12, 8), driver="570.10"), BUILD, "570.10", "580.65"),
        (SEARCH, TorchBuild(cuda="13.0"), "does not see", "CUDA_VISIBLE_DEVICES"),
        (_with(capability=(6, 1)), BUILD, "too old", "2017"),
        (SEARCH, dataclasses.replace(BUILD, has_triton=False), "triton", "pip install triton"),
    ],
    ids=["cpu-torch", "old-driver", "hidden", "old-card", "no-triton"],
)
def test_card_that_torch_cannot_use_is_named_with_the_remedy(
    search: CardSearch, build: TorchBuild, text: str, hint: str
) -> None:
    fact = _facts(search, build)["gpu-0"]

    assert fact.mark is FactMark.PROBLEM
    assert text in fact.text
    assert hint in fact.hint


@pytest.mark.parametrize(
    ("search", "build", "host", "hint"),
    [
        (dataclasses.replace(SEARCH, cuda=(12, 8)), BUILD, WSL, "driver 580 or newer in Windows"),
        (dataclasses.replace(SEARCH, cuda=(12, 8)), BUILD, WINDOWS, "driver 580 or newer, or"),
        (SEARCH, TorchBuild(cuda="13.0"), WSL, "/usr/lib/wsl/lib is in LD_LIBRARY_PATH"),
        (SEARCH, TorchBuild(cuda="13.0"), WINDOWS, "Look at CUDA_VISIBLE_DEVICES."),
        (SEARCH, dataclasses.replace(BUILD, has_triton=False), WINDOWS, "WSL 2"),
    ],
)
def test_remedy_for_a_card_is_that_of_its_system(
    search: CardSearch, build: TorchBuild, host: HostSystem, hint: str
) -> None:
    assert hint in _facts(search, build, host=host)["gpu-0"].hint


@pytest.mark.parametrize(
    ("has_driver", "hint"), [(True, "LD_LIBRARY_PATH"), (False, "install its driver in Windows")]
)
def test_wsl_without_a_card_hears_what_may_be_missing(has_driver: bool, hint: str) -> None:
    host = dataclasses.replace(WSL, has_wsl_driver=has_driver)
    fact = _facts(CardSearch(), TorchBuild(), host=host)["gpu"]

    assert fact.mark is FactMark.NOTE
    assert hint in fact.hint


def test_linux_driver_inside_wsl_is_named_as_the_mistake() -> None:
    broken = find_cards(FakeNvml("Driver/library version mismatch"))

    assert "Linux driver" in _facts(broken, host=WSL)["gpu"].hint


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"capability": (7, 5)}, "gpu-0-bfloat16", "float16 is taken, and float32 once"),
        ({"free_bytes": 20 * GIB}, "gpu-0-others", "other programs"),
        ({"link_width": 4}, "gpu-0-link", "4 of 16 lanes"),
    ],
)
def test_card_with_a_drawback_is_used_and_the_drawback_told(
    changes: dict[str, object], code: str, text: str
) -> None:
    facts = _facts(_with(**changes))

    assert facts["gpu-0"].mark is FactMark.OK
    assert text in facts[code].text
    assert facts[code].hint


@pytest.mark.parametrize(
    ("build", "limits", "text"),
    [
        (TorchBuild(hip="7.0"), SystemLimits(), "ROCm"),
        (TorchBuild(), SystemLimits(has_amd_driver=True), "AMD"),
        (TorchBuild(has_mps=True), SystemLimits(), "Apple"),
        (TorchBuild(), SystemLimits(), "none"),
    ],
)
def test_machine_without_an_nvidia_card_hears_what_works(
    monkeypatch: pytest.MonkeyPatch, build: TorchBuild, limits: SystemLimits, text: str
) -> None:
    monkeypatch.setattr("sys.platform", "linux")

    assert text in _facts(CardSearch(), build, limits)["gpu"].text


def test_little_lockable_memory_and_a_container_are_told() -> None:
    facts = _facts(limits=SystemLimits(locked_bytes=64 << 10, container_bytes=8 * GIB))

    assert facts["pinned-memory"].mark is FactMark.NOTE
    assert facts["container-memory"].value == 8 * GIB


def test_limits_are_read_from_both_kinds_of_containers(tmp_path: Path) -> None:
    assert look_at_limits(tmp_path).container_bytes is None
    old = tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    old.parent.mkdir(parents=True)
    old.write_text("9223372036854771712\n", encoding="ascii")
    assert look_at_limits(tmp_path).container_bytes is None
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n", encoding="ascii")
    old.write_text("4096\n", encoding="ascii")
    assert look_at_limits(tmp_path).container_bytes == 4096
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("2048\n", encoding="ascii")
    assert look_at_limits(tmp_path).container_bytes == 2048


@pytest.mark.parametrize(
    ("capability", "wanted", "expected"),
    [
        (None, None, ComputeDtype.BFLOAT16),
        (None, ComputeDtype.FLOAT32, ComputeDtype.FLOAT32),
        ((8, 0), None, ComputeDtype.BFLOAT16),
        ((12, 0), None, ComputeDtype.BFLOAT16),
        ((8, 9), ComputeDtype.FLOAT16, ComputeDtype.FLOAT16),
        ((7, 5), None, ComputeDtype.FLOAT16),
        ((7, 0), ComputeDtype.FLOAT16, ComputeDtype.FLOAT16),
        ((7, 5), ComputeDtype.FLOAT32, ComputeDtype.FLOAT32),
    ],
)
def test_arithmetic_is_as_asked_or_the_usual_one_of_the_device(
    capability: tuple[int, int] | None, wanted: ComputeDtype | None, expected: ComputeDtype
) -> None:
    assert dtype_on(capability, wanted) is expected


@pytest.mark.parametrize(
    ("capability", "wanted", "fix"),
    [((7, 5), ComputeDtype.BFLOAT16, "float32"), (None, ComputeDtype.FLOAT16, "--gpu")],
    ids=["bfloat16-on-an-old-card", "float16-on-a-processor"],
)
def test_arithmetic_that_the_device_has_not_is_refused_with_the_fix(
    capability: tuple[int, int] | None, wanted: ComputeDtype, fix: str
) -> None:
    with pytest.raises(ConfigError, match=wanted.value) as caught:
        dtype_on(capability, wanted)

    assert fix in caught.value.hint
