"""In which order shards are used up, and how much of the disk that takes. Pure.

A shard may go once the backbone has its tensors and every layer with experts in it is
converted. Layers are taken in the order of their shards and not of their numbers, so that
few shards wait at once however a publisher sorted them; shards without experts come first,
while the disk is emptiest. What a description promises and what preparation does are both
read off the steps made here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStep:
    """One piece of work: have shards, take the backbone's part of them, convert a layer.

    Attributes:
        shards: Names of those that must be here, sorted.
        layer: MoE layer that is converted with them, `None` where they are only the backbone's.
        dropped: Those that no later step needs.
    """

    shards: tuple[str, ...]
    layer: int | None
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceNeed:
    """By how much the disk fills up at the most, in bytes.

    Attributes:
        weights_bytes: Of downloaded files, at one time.
        made_bytes: Of what is made of them, at the end.
        whole_bytes: Of both, at one time; less than their sum where files are deleted.
    """

    weights_bytes: int
    made_bytes: int
    whole_bytes: int


def shard_steps(
    layer_shards: Sequence[Collection[str]],
    backbone_shards: Iterable[str],
    *,
    done_layers: Collection[int] = (),
    done_shards: Collection[str] = (),
) -> tuple[ShardStep, ...]:
    """Puts what is left of the work in order.

    Args:
        layer_shards: For each MoE layer the shards with its experts.
        backbone_shards: Shards with anything of the backbone.
        done_layers: Layers that are converted into every store.
        done_shards: Shards whose part of the backbone is written.
    """
    layers = [layer for layer in range(len(layer_shards)) if layer not in done_layers]
    layers.sort(key=lambda layer: (sorted(layer_shards[layer]), layer))
    needed = {name for layer in layers for name in layer_shards[layer]}
    alone = sorted(set(backbone_shards) - set(done_shards) - needed)
    work: list[tuple[int | None, tuple[str, ...]]] = [(None, (name,)) for name in alone]
    work += [(layer, tuple(sorted(layer_shards[layer]))) for layer in layers]
    steps: list[ShardStep] = []
    later: set[str] = set()
    for layer, names in reversed(work):
        dropped = tuple(name for name in names if name not in later)
        steps.append(ShardStep(shards=names, layer=layer, dropped=dropped))
        later.update(names)
    return tuple(reversed(steps))


def space_need(
    steps: Iterable[ShardStep],
    *,
    shard_bytes: Mapping[str, int],
    backbone_bytes: Mapping[str, int],
    layer_bytes: Mapping[int, int],
    here_bytes: Mapping[str, int],
    is_dropping: bool = True,
) -> SpaceNeed:
    """Works out how much more of the disk the steps take, from how it is now.

    Args:
        steps: From `shard_steps`.
        shard_bytes: Length of each shard.
        backbone_bytes: What is still to be written of each shard's part of the backbone.
        layer_bytes: What is still to be written of each layer, in all stores.
        here_bytes: What is already here of each shard.
        is_dropping: Whether shards go when a step says so.
    """
    here = dict(here_bytes)
    taken: set[str] = set()
    weights = most_weights = made = most = 0
    for step in steps:
        for name in step.shards:
            weights += shard_bytes[name] - here.get(name, 0)
            here[name] = shard_bytes[name]
            made += backbone_bytes.get(name, 0) if name not in taken else 0
            taken.add(name)
        made += 0 if step.layer is None else layer_bytes[step.layer]
        most_weights, most = max(most_weights, weights), max(most, weights + made)
        for name in step.dropped if is_dropping else ():
            weights -= here.pop(name)
    return SpaceNeed(weights_bytes=most_weights, made_bytes=made, whole_bytes=most)
