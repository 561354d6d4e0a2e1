"""Recorded work of a device that does not exist: operators and launches, replayed one by one.

Recording runs the work once, to see what it does, and then undoes all that it wrote, since a
device computes nothing while it records. Numbers are recorded as they are: whatever came from
the host stays as it was. What would wait for the device or bring data to the host is refused.

Memory that recorded work takes is a pool's. It lasts while somebody outside refers to it; what
nobody refers to is nan, or -1, at the beginning of each piece, as if others had used it. And
right after recording, all of it is. Launches tell `FakeQueues` which slots they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from fake_queues import FakeQueues
from mira_engine.runtime.graphs import Work
from mira_kernels import triton_experts
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

KERNELS = ("up_kernel", "down_kernel", "draft_down_kernel", "combine_kernel")

_WRITTEN = {"inner", "result", "misses", "block_start"}
"""Kernel arguments that may be written to."""

_WAITING = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "argwhere",
    "masked_select",
    "_unique2",
    "lift_fresh",
)
"""Operators that a device cannot record: the host would have to see a result, or its own
memory would be read at replay. In inference mode the composite ones are seen as they are."""

_ON_HOST = ("tolist", "item", "cpu", "numpy")

_POISON = 0xFF


class RecordingError(RuntimeError):
    """Work that a device cannot record."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in the pool."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Operator:
    """One call: of an operator, or of a kernel on a grid."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[_Place | None, ...] = ()


class _Pool:
    """What was made while recording, by address of its descriptor."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        self.made.setdefault(reference.cdata, (reference, storage.nbytes()))

    def place(self, tensor: Tensor) -> _Place | Tensor:
        """Where a tensor is; the tensor itself if it is not of the pool."""
        key = key_of(tensor)
        if key not in self.made:
            return tensor
        return _Place(
            key, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        )

    def alive(self) -> list[torch.UntypedStorage]:
        return [
            torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            for reference, _ in self.made.values()
            if not reference.expired()
        ]

    def storage(self, key: int, others: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        """The memory itself; of what nobody refers to, `others` has one for this replay."""
        reference, num_bytes = self.made[key]
        if not reference.expired():
            return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if key not in others:
            others[key] = torch.full((num_bytes,), _POISON, dtype=torch.uint8).untyped_storage()
        return others[key]


def key_of(tensor: Tensor) -> int:
    """Says whose memory it is."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


class FakeRecording:
    """A piece.

    Args:
        pool: Its memory.
        operators: In order.
        graphs: Where it was made.
    """

    def __init__(self, pool: _Pool, operators: list[_Operator], graphs: FakeGraphs) -> None:
        self._pool = pool
        self._operators = operators
        self._graphs = graphs

    def replay(self) -> None:
        """Runs all of it in order, in the memory in which it was recorded."""
        self._graphs.num_replays += 1
        others: dict[int, torch.UntypedStorage] = {}

        def tensor(place: _Place) -> Tensor:
            storage = self._pool.storage(place.storage, others)
            empty = torch.empty(0, dtype=place.dtype)
            return empty.set_(storage, place.offset, place.size, place.stride)

        for operator in self._operators:
            args, kwargs = tree_map_only(_Place, tensor, (operator.args, operator.kwargs))
            found = operator.run(*args, **kwargs)
            for place, value in zip(operator.results, tree_leaves(found), strict=False):
                if place is not None:
                    tensor(place).copy_(value)


class FakeGraphs:
    """Records on the host.

    Args:
        queues: Told what launches read, `None` for nobody.
    """

    def __init__(self, queues: FakeQueues | None = None) -> None:
        self.num_bytes = 0
        self.num_replays = 0
        self.num_captures = 0
        self._queues = queues
        self._left: WeakSet[FakeRecording] | None = None
        self._recorder: _Recorder | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the launches of all kernels come through here."""
        for name in KERNELS:
            kernel = _Kernel(getattr(triton_experts, name), self)
            monkeypatch.setattr(triton_experts, name, kernel)

    def capture(self, work: Work) -> list[FakeRecording]:
        """Runs `work` once as it is, then records it."""
        work(lambda: None)
        if self._left is not None and not self._left:
            raise RecordingError("the pool has lost its last recording: it takes no other")
        self.num_captures += 1
        recorder = _Recorder()
        self._recorder = recorder
        try:
            with recorder, _asking_nothing(recorder):
                work(recorder.cut)
        finally:
            self._recorder = None
            recorder.undo()
        alive = recorder.pool.alive()
        for storage in alive:
            storage.fill_(_POISON)
        self.num_bytes += sum(storage.nbytes() for storage in alive)
        recordings = [FakeRecording(recorder.pool, piece, self) for piece in recorder.pieces]
        self._left = self._left or WeakSet()
        self._left.update(recordings)
        return recordings

    def renew(self) -> None:
        """Begins another pool."""
        assert not self._left, "recordings are left whose memory is given back"
        self._left = None
        self.num_bytes = 0

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs a kernel, and records it if something is recorded."""
        if self._recorder is not None:
            self._recorder.note_launch(_Launch(self, kernel, grid), args, kwargs)
        else:
            self._tell_reads(dict(zip(kernel.arg_names, args, strict=False)))
        with _disable_current_modes(), self._unwatched():
            kernel[grid](*args, **kwargs)

    @contextmanager
    def _unwatched(self) -> Any:
        """The interpreter looks into memory where a device would not."""
        recorder = self._recorder
        if recorder is None:
            yield
            return
        recorder.is_watching = False
        try:
            yield
        finally:
            recorder.is_watching = True

    def _tell_reads(self, given: dict[str, Any]) -> None:
        if self._queues is None or "table" not in given:
            return
        chosen = given.get("block_expert", given.get("top_k_index"))
        experts = sorted({expert for expert in chosen.reshape(-1).tolist() if expert >= 0})
        for plane in ("", "low_"):
            data = given["low8" if plane else "bytes8"]
            size = given[f"{plane}record_bytes"]
            for slot in given[f"{plane}table"][experts].tolist():
                if slot >= 0:
                    self._queues.read(data[slot * size : (slot + 1) * size])


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """A kernel on a grid, as something to call."""

    graphs: FakeGraphs
    kernel: Any
    grid: Any

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.graphs.launch(self.kernel, self.grid, args, kwargs)


class _Kernel:
    """Stands for a kernel where it is launched."""

    def __init__(self, kernel: Any, graphs: FakeGraphs) -> None:
        self._kernel = kernel
        self._graphs = graphs

    def __getitem__(self, grid: Any) -> _Launch:
        return _Launch(self._graphs, self._kernel, grid)


class _Recorder(TorchDispatchMode):
    """Sees all operators while work is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = _Pool()
        self.pieces: list[list[_Operator]] = [[]]
        self.is_watching = True
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def cut(self) -> None:
        """Begins another piece."""
        self.pieces.append([])

    def undo(self) -> None:
        """Puts back what was written to memory that is not of the pool."""
        for tensor, before in self._before.values():
            tensor.copy_(before)

    def _save(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        if key not in self.pool.made and key not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[key] = whole, whole.clone()

    def note_launch(self, launch: _Launch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A kernel is launched."""
        with _disable_current_modes():
            for name, value in zip(launch.kernel.arg_names, args, strict=False):
                if name in _WRITTEN:
                    self._save(value)
            given = tree_map_only(Tensor, self.pool.place, (args, kwargs))
        self.pieces[-1].append(_Operator(launch, *given))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        is_mask = name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])
        if name in _WAITING or is_mask:
            raise RecordingError(f"{name} cannot be recorded")
        given = tree_map_only(Tensor, self.pool.place, (tuple(args), kwargs))
        known = {key_of(tensor) for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._save(value)
        found = func(*args, **kwargs)
        results: list[_Place | None] = []
        for tensor in tree_leaves(found):
            is_new = _is_tensor(tensor) and key_of(tensor) not in known
            if is_new:
                self.pool.note(tensor.untyped_storage())
            results.append(self.pool.place(tensor) if is_new else None)
        is_computed = func._schema.is_mutable or any(results)
        if is_computed and not name.startswith(("empty", "new_empty")):
            self.pieces[-1].append(_Operator(func, *given, tuple(results)))
        return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def _asking_nothing(recorder: _Recorder) -> Any:
    """Refuses what brings data to the host, inside."""
    with ExitStack() as stack:
        for name in _ON_HOST:
            allowed = getattr(Tensor, name)

            def ask(tensor: Tensor, *args: Any, _ask: Any = allowed, _name: str = name) -> Any:
                if recorder.is_watching:
                    raise RecordingError(f"{_name} waits for the device")
                return _ask(tensor, *args)

            stack.enter_context(mock.patch.object(Tensor, name, ask))
        yield
