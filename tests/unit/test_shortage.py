"""Shortages of memory are told from other failures, and say how much less to ask for."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mira_engine import worker
from mira_engine.errors import (
    BudgetError,
    MemoryShortageError,
    MiraError,
    StoreError,
    error_from_fields,
)
from mira_engine.memory_retry import smaller_budget
from mira_engine.runtime.capture import StepCapture
from mira_engine.runtime.host_memory import allocate_chunks, pageable
from mira_engine.runtime.shortage import LEAST_CHUNK, as_shortage, is_out_of_memory, smaller_chunk
from shortages import SHORTAGES


@pytest.mark.parametrize("kind", SHORTAGES)
def test_every_allocator_is_heard(kind: str) -> None:
    assert is_out_of_memory(SHORTAGES[kind]())


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "can't start new thread",
    ],
)
def test_every_wording_is_heard(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def test_library_that_finds_no_room_is_heard() -> None:
    assert is_out_of_memory(ImportError("libtorch_cpu.so: failed to map segment from file"))
    assert not is_out_of_memory(ImportError("No module named 'triton'"))


def test_shortage_is_told_where_not_even_its_module_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mira_engine.runtime.shortage", None)

    assert "ulimit" in worker._shortage(MemoryError()).hint
    assert worker._shortage(ValueError("other")) is None


def test_capture_whose_thread_cannot_start_can_be_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    capture = StepCapture(torch.nn.Linear(2, 2), tmp_path, tmp_path, lambda code, text: None)
    with pytest.raises(RuntimeError):
        capture.start([], torch.float32, {})

    capture.close()


def test_allocation_that_torch_refuses_is_heard() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)

    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("out of resource: shared memory, Required: 1, Hardware limit: 0"),
        OSError(28, "No space left on device"),
        ValueError("out of memory"),
        StoreError("The store ran out of memory."),
    ],
)
def test_other_failures_are_no_shortage(error: Exception) -> None:
    assert as_shortage(error, "in a reply") is None


class _Tensor:
    """Stands for what a frame holds."""


def test_shortage_holds_nothing_of_the_frames_it_came_through() -> None:
    seen: list[weakref.ref[_Tensor]] = []

    def compute() -> None:
        held = _Tensor()
        seen.append(weakref.ref(held))
        raise MemoryError("here")

    shortage = None
    try:
        compute()
    except MemoryError as error:
        shortage = as_shortage(error, "in a test")
    gc.collect()

    assert shortage is not None
    assert seen[0]() is None
    assert "in compute" in "".join(shortage.__notes__)


def test_shortage_crosses_the_process_boundary_as_itself() -> None:
    shortage = as_shortage(MemoryError(), "while the model was loaded")
    assert shortage is not None

    found = error_from_fields(shortage.to_fields())

    assert type(found) is MemoryShortageError
    assert isinstance(found, BudgetError)
    assert "loaded" in found.message
    assert "--budget" in found.hint


@pytest.mark.parametrize(
    ("planned", "free", "expected"),
    [(500, 1000, 899), (500, 420, 899), (500, 300, 800), (5000, 100, 1)],
    ids=["transient", "little", "much", "all"],
)
def test_budget_shrinks_by_what_is_missing_and_by_a_tenth_at_least(
    planned: int, free: int, expected: int
) -> None:
    assert smaller_budget(budget_bytes=1000, planned_bytes=planned, free_bytes=free) == expected


def test_chunks_shrink_to_a_least_one() -> None:
    assert smaller_chunk(256) == 64
    assert smaller_chunk(20) == LEAST_CHUNK


def test_host_memory_that_python_does_not_give_ends_the_chunks() -> None:
    def allocate(num_bytes: int) -> torch.Tensor:
        del num_bytes
        raise MemoryError

    assert allocate_chunks(4096, 4096, allocate) == []
    assert len(allocate_chunks(4096, 4096, pageable)) == 1


def test_shortage_told_before_is_not_told_again() -> None:
    make: Callable[[str], MiraError] = MemoryShortageError
    assert as_shortage(make("Memory ran out."), "in a reply") is None
