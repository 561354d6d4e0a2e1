"""Memory that outlives a piece of recorded work.

Pieces of one recording share a pool: what is dead when a piece ends is taken again by a later
one. A piece that shall be replayed after later ones ran must find what it reads unharmed; that
is what was alive when it began. Everything made while recording is known here by a weak
reference, and at each cut what is alive gets a strong one. The rest of the pool needs no care.

A piece must also leave what it reads as it was. Work that changes in place what an earlier
piece made cannot be replayed and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UnsupportedModelError


class BoundaryMemory(TorchDispatchMode):
    """Watches work that is recorded in pieces. Enter it, and call `cut` between them.

    Attributes:
        kept: Storages alive at a cut, by address of their descriptor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        """What was made, and in which piece. The weak reference keeps the key from being
        given to another."""
        self._num_cuts = 0

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        return sum(storage.nbytes() for storage in self.kept.values())

    def cut(self) -> None:
        """A piece ends: what is alive now is kept."""
        for key, (reference, _) in self._made.items():
            if not reference.expired():
                self.kept[key] = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        self._num_cuts += 1

    def leave_out(self, *tensors: Tensor) -> None:
        """Treats memory that was made in here like memory from outside: somebody keeps it, and
        every replay may write to it."""
        for tensor in tensors:
            self._made.pop(_key(tensor), None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Notes what an operator makes; refuses what would not survive a replay."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._refuse_lasting_changes(func, args, kwargs)
        result = func(*args, **kwargs)
        given = {_key(tensor) for tensor in _tensors([*args, *kwargs.values()])}
        for tensor in _tensors([result]):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in given:
                self._made.setdefault(reference.cdata, (reference, self._num_cuts))
        return result

    def _refuse_lasting_changes(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in _tensors([value]):
                _, piece = self._made.get(_key(tensor), (None, self._num_cuts))
                if piece != self._num_cuts:
                    raise UnsupportedModelError(
                        "it changes in place what was computed before a router"
                    )


def _key(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
