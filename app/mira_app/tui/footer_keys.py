"""What a footer leaves out where its keys would not fit: they hold all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from textual.screen import ActiveBinding


def without(
    bindings: Mapping[str, ActiveBinding], binding_ids: Collection[str]
) -> dict[str, ActiveBinding]:
    """Returns the bindings, those named not shown.

    Args:
        bindings: A screen's `active_bindings`.
        binding_ids: What matters less than the rest.
    """
    return {
        key: active._replace(binding=dataclasses.replace(active.binding, show=False))
        if active.binding.id in binding_ids
        else active
        for key, active in bindings.items()
    }
