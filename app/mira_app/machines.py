"""Machines to plan for: a card of the table, or a file with what was measured elsewhere.

A machine file is TOML or JSON with the fields of `MachineRates`. Bytes and rates are
numbers or sizes such as `12GiB` and `25GB/s`. Torch-free.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from mira_assets.gpus import Gpu, load_gpus
from mira_engine.api import ConfigError, MachineRates, MemoryAmount

from .paths import home_expanded

_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""PCIe, one lane in one direction after line coding."""

_LINK_EFFICIENCY = 0.8
"""What large copies from pinned memory reach of that."""

_MEMORY_EFFICIENCY = 0.8
"""What reading weights reaches of a memory's specified rate."""

_CARD_RECORD_LATENCY_S = 1e-5
_CARD_LAYER_OVERHEAD_S = 6e-5

_SIZES = ("device_memory_bytes", "host_memory_bytes")
_RATES = (
    "device_bytes_per_s", "link_bytes_per_s", "disk_bytes_per_s", "host_bytes_per_s",
    "host_packed_bytes_per_s",
)  # fmt: skip
_SWITCHES = ("is_gpu", "has_bfloat16")
_FIELDS = {field.name: field for field in dataclasses.fields(MachineRates)}
_REQUIRED = tuple(
    name
    for name, field in _FIELDS.items()
    if field.default is dataclasses.MISSING and name != "name"
)


def find_machine(name: str) -> MachineRates:
    """Returns a card of the table, or the machine that a file describes.

    Raises:
        ConfigError: There is no such card or file, or the file has something unusable.
    """
    gpus = load_gpus()
    card = gpus.get(name.strip().lower().replace(" ", "-"))
    if card is not None:
        return rates_of_card(card)
    path = home_expanded(name)
    if path.is_file():
        return _read_file(path)
    near = difflib.get_close_matches(name.lower(), gpus, n=3, cutoff=0.5)
    known = f"Did you mean {' or '.join(near)}?" if near else f"Known cards: {', '.join(gpus)}."
    raise ConfigError(f"There is no card and no file {name!r}.", hint=known)


def rates_of_card(card: Gpu) -> MachineRates:
    """Turns a card's specification into rates; cautious, since nothing was measured."""
    lanes = card.pcie_lanes * _LANE_BYTES_PER_S[card.pcie_generation]
    return MachineRates(
        name=card.title,
        device_memory_bytes=card.memory_gib * 2**30,
        device_bytes_per_s=_MEMORY_EFFICIENCY * card.bandwidth_gb_per_s * 1e9,
        link_bytes_per_s=_LINK_EFFICIENCY * lanes,
        link_latency_s=_CARD_RECORD_LATENCY_S,
        layer_overhead_s=_CARD_LAYER_OVERHEAD_S,
        is_gpu=True,
        has_bfloat16=card.has_bfloat16,
    )


def _read_file(path: Path) -> MachineRates:
    try:
        text = path.read_text(encoding="utf-8")
        is_json = path.suffix.lower() == ".json"
        fields = json.loads(text) if is_json else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The machine file {path} cannot be read: {error}.", hint="Write TOML or JSON."
        ) from error
    if not isinstance(fields, Mapping):
        raise ConfigError(f"The machine file {path} is no table of fields.", hint=_all_fields())
    return machine_of(fields, source=str(path))


def machine_of(fields: Mapping[str, object], *, source: str) -> MachineRates:
    """Builds rates from the fields of a machine file.

    Raises:
        ConfigError: A field is unknown, missing, or has a value that cannot be used.
    """
    for name in fields:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.5)
            raise ConfigError(
                f"{source}: there is no field {name!r}.",
                hint=f"Did you mean {near[0]}?" if near else _all_fields(),
            )
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ConfigError(f"{source}: {', '.join(missing)} must be given.", hint=_all_fields())
    values = {name: _value(name, value, source) for name, value in fields.items()}
    return MachineRates(**{"name": Path(source).stem, **values})  # type: ignore[arg-type]


def _value(name: str, value: object, source: str) -> object:
    where = f"{source}: {name}"
    if name == "name":
        return str(value)
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise ConfigError.for_field(where, value, "Give true or false.")
        return value
    if isinstance(value, str) and name in _SIZES + _RATES:
        return _bytes(where, value, is_rate=name in _RATES)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError.for_field(where, value, "Give a number.")
    return int(value) if name in _SIZES and value == value // 1 else value


def _bytes(where: str, text: str, *, is_rate: bool) -> int:
    hint = f"Write a size such as {'25GB/s' if is_rate else '12GiB'}, or a number of bytes."
    try:
        amount = MemoryAmount.parse(text.strip().removesuffix("/s") if is_rate else text)
    except ConfigError:
        raise ConfigError.for_field(where, text, hint) from None
    if amount.num_bytes is None:
        raise ConfigError.for_field(where, text, hint)
    return amount.num_bytes


def _all_fields() -> str:
    return f"Fields: {', '.join(_FIELDS)}; needed are {', '.join(_REQUIRED)}."
