"""The expert store: one safetensors file per layer and plane, and a manifest.

Each file has one tensor `records`, uint8 `[num_experts, record_bytes]`, whose data starts
on a multiple of 4096: any safetensors reader opens it, and one aligned read moves one
record. The manifest is written last; until then `unfinished.json` keeps the account of
finished layers, so that a killed conversion goes on behind the last of them.

Knows records as bytes and formats by name; which tensors become records is `convert`'s.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

from ..errors import CheckpointError, StoreError
from ..types import RECORD_ALIGNMENT, ExpertShape, Plane, Precision, Rounding
from .files import MANIFEST_FILE
from .formats import ExpertFormat, make_format
from .shards import read_bytes, read_header
from .writing import (
    TensorFileWriter,
    disk_errors,
    file_sha256,
    header_bytes,
    sync_folder,
    write_json,
)

STORE_VERSION = 1
UNFINISHED_FILE = "unfinished.json"
_PREPARE_AGAIN = "Prepare the model again; what is whole is kept."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a store: its bytes and their SHA-256 in hexadecimal."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreManifest:
    """What a store holds.

    Attributes:
        precision: Expert format.
        layout: Order of codes in memory, by the format's name for it.
        shape: Dimensions of every expert.
        num_layers: MoE layers.
        num_experts: Experts in each.
        group_size: Inputs that share a scale, `None` where scales are not by group.
        planes: Bytes of one record of each plane, in storing order.
        source: Where the weights came from, for people.
        revision: Fingerprint of the checkpoint.
        files: Every file by name.
        rounding: How the INT4 codes of the draft's plane were chosen.
        calibration: Fingerprint of what they were chosen by, empty where each is the nearest.
    """

    precision: Precision
    layout: str
    shape: ExpertShape
    num_layers: int
    num_experts: int
    group_size: int | None
    planes: Mapping[Plane, int]
    source: str
    revision: str
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    version: int = STORE_VERSION
    rounding: Rounding = Rounding.NEAREST
    calibration: str = ""

    @classmethod
    def of_format(
        cls, fmt: ExpertFormat, *, num_layers: int, num_experts: int, source: str, revision: str
    ) -> StoreManifest:
        """Describes a store of this format that has no file yet."""
        return cls(
            precision=fmt.precision,
            layout=fmt.layout,
            shape=fmt.shape,
            num_layers=num_layers,
            num_experts=num_experts,
            group_size=fmt.group_size,
            planes={plane: fmt.record_bytes(plane) for plane in fmt.planes},
            source=source,
            revision=revision,
        )

    def is_same_store(self, other: StoreManifest) -> bool:
        """Whether both describe the same bytes, finished or not."""
        return replace(self, files={}, source="") == replace(other, files={}, source="")

    @property
    def file_bytes(self) -> Mapping[Plane, int]:
        """Bytes of one layer's file of each plane."""
        return {
            plane: len(self._header(plane)) + self.num_experts * record_bytes
            for plane, record_bytes in self.planes.items()
        }

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of the finished store."""
        return self.num_layers * sum(self.file_bytes.values())

    def _header(self, plane: Plane) -> bytes:
        return header_bytes(self.specs(plane), alignment=RECORD_ALIGNMENT)

    def specs(self, plane: Plane) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns the tensors of one layer's file of the plane."""
        return {"records": (torch.uint8, (self.num_experts, self.planes[plane]))}

    def to_json(self) -> dict[str, object]:
        """Returns plain values for `manifest.json`."""
        return asdict(self)

    @classmethod
    def from_file(cls, path: Path) -> StoreManifest:
        """Reads a manifest.

        Raises:
            StoreError: It is missing, unreadable, or of another version.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            version = raw["version"]
        except FileNotFoundError as error:
            raise StoreError(
                f"The expert store {path.parent} is unfinished.", hint=_PREPARE_AGAIN
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} cannot be read.", hint=_PREPARE_AGAIN) from error
        if version != STORE_VERSION:
            raise StoreError(
                f"{path.parent} is an expert store of version {version}; this program reads "
                f"version {STORE_VERSION}.",
                hint=_PREPARE_AGAIN,
            )
        try:
            raw = {"rounding": Rounding.NEAREST, "calibration": ""} | raw  # Older stores.
            known = {name: raw[name] for name in (item.name for item in fields(cls))}
            known["precision"] = Precision(raw["precision"])
            known["shape"] = ExpertShape(**raw["shape"])
            known["planes"] = {Plane(name): int(size) for name, size in raw["planes"].items()}
            known["rounding"] = Rounding(raw["rounding"])
            known["files"] = {name: StoredFile(**entry) for name, entry in raw["files"].items()}
            return cls(**known)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{path} cannot be read.", hint=_PREPARE_AGAIN) from error


def file_name(layer: int, plane: Plane) -> str:
    """Returns the name of one layer's file of a plane."""
    return f"layer-{layer:04d}.{plane.value}.safetensors"


class ExpertStore:
    """A finished store. Opening it checks every file's length and header, not its hash.

    Attributes:
        folder: Where it is.
        manifest: What it holds.
        format: Encodes and binds its records.
    """

    def __init__(self, folder: Path, manifest: StoreManifest, fmt: ExpertFormat) -> None:
        self.folder = folder
        self.manifest = manifest
        self.format = fmt
        self._data_offset = {
            plane: size - manifest.num_experts * manifest.planes[plane]
            for plane, size in manifest.file_bytes.items()
        }

    @classmethod
    def open(cls, folder: Path) -> ExpertStore:
        """Opens a store.

        Raises:
            StoreError: It is unfinished or damaged; names the file.
            FormatError: This program has no such format or layout.
        """
        manifest = StoreManifest.from_file(folder / MANIFEST_FILE)
        fmt = make_format(manifest.precision, manifest.shape, layout=manifest.layout)
        sizes = {plane: fmt.record_bytes(plane) for plane in fmt.planes}
        if sizes != dict(manifest.planes) or fmt.group_size != manifest.group_size:
            raise StoreError(f"{folder} has records of another form.", hint=_PREPARE_AGAIN)
        store = cls(folder, manifest, fmt)
        for layer in range(manifest.num_layers):
            for plane in fmt.planes:
                store._check_file(layer, plane)
        return store

    def _check_file(self, layer: int, plane: Plane) -> None:
        path = self.folder / file_name(layer, plane)
        entry = self.manifest.files.get(path.name)
        expected = self.manifest.file_bytes[plane]
        try:
            found = read_header(path).get("records")
        except CheckpointError as error:
            raise StoreError(
                f"The expert store is damaged: {error.message}", hint=_PREPARE_AGAIN
            ) from error
        shape = (self.manifest.num_experts, self.manifest.planes[plane])
        if (
            entry is None
            or entry.num_bytes != expected
            or found is None
            or found.shape != shape
            or found.offset != self._data_offset[plane]
        ):
            raise StoreError(
                f"The expert store is damaged: {path} does not hold what the manifest says.",
                hint=_PREPARE_AGAIN,
            )

    def record_location(self, layer: int, plane: Plane, expert: int) -> tuple[Path, int, int]:
        """Returns file, offset and length of a record; both numbers divide by 4096."""
        num_bytes = self.manifest.planes[plane]
        offset = self._data_offset[plane] + expert * num_bytes
        return self.folder / file_name(layer, plane), offset, num_bytes

    def read_record(self, layer: int, plane: Plane, expert: int) -> torch.Tensor:
        """Reads one record, uint8 `[record_bytes]`.

        Raises:
            StoreError: The file cannot be read or is shorter than it was.
        """
        try:
            return read_bytes(*self.record_location(layer, plane, expert))
        except CheckpointError as error:
            raise StoreError(
                f"The expert store is damaged: {error.message}", hint=_PREPARE_AGAIN
            ) from error

    def verify(self, on_bytes: Callable[[int], None] = lambda done: None) -> None:
        """Compares every file with the manifest's hash; `on_bytes` gets the bytes so far.

        Raises:
            StoreError: A file differs; names it.
        """
        done = 0
        for name, entry in self.manifest.files.items():
            start = done
            path = self.folder / name
            try:
                found = file_sha256(path, lambda read, start=start: on_bytes(start + read))
            except OSError as error:
                raise StoreError(f"{path} cannot be read.", hint=_PREPARE_AGAIN) from error
            if found != entry.sha256:
                raise StoreError(f"{path} is damaged: its hash differs.", hint=_PREPARE_AGAIN)
            done += entry.num_bytes


class StoreWriter:
    """Writes a store layer by layer; what an earlier run finished is taken over.

    A folder that holds another store (other precision, layout or checkpoint) is emptied of
    its store files first.

    Raises:
        DiskSpaceError: The disk is full.
        PrepareError: The folder cannot be written.
    """

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder = folder
        self._manifest = replace(manifest, files={})
        self._files = dict(self._earlier_files())
        if not self._files:
            self._clear()
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def _earlier_files(self) -> Mapping[str, StoredFile]:
        for name in (MANIFEST_FILE, UNFINISHED_FILE):
            try:
                found = StoreManifest.from_file(self.folder / name)
            except StoreError:
                continue  # None there, or one of another program: nothing to take over.
            if found.is_same_store(self._manifest):
                return found.files
        return {}

    def _clear(self) -> None:
        with disk_errors(self.folder):
            for pattern in (MANIFEST_FILE, UNFINISHED_FILE, "layer-*"):
                for path in self.folder.glob(pattern):
                    path.unlink()

    @property
    def is_finished(self) -> bool:
        """Whether the manifest is there and every layer has its files."""
        return (self.folder / MANIFEST_FILE).exists() and all(
            self.is_layer_done(layer) for layer in range(self._manifest.num_layers)
        )

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be written."""
        num_missing = sum(
            not self.is_layer_done(layer) for layer in range(self._manifest.num_layers)
        )
        return num_missing * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's files."""
        return sum(self._manifest.file_bytes.values())

    def is_layer_done(self, layer: int) -> bool:
        """Whether the layer's files are on the account and have their length."""
        for plane, expected in self._manifest.file_bytes.items():
            name = file_name(layer, plane)
            path = self.folder / name
            if name not in self._files or not path.exists() or path.stat().st_size != expected:
                return False
        return True

    def write_layer(self, layer: int, records: Iterable[Mapping[Plane, torch.Tensor]]) -> None:
        """Writes one layer from its experts' records, in order of the experts.

        Args:
            layer: Which.
            records: For each expert the record of every plane; consumed one by one, so
                that a generator never has more than one expert in memory.

        Raises:
            DiskSpaceError: The disk is full; layers written before are kept.
            PrepareError: A file cannot be written.
        """
        writers: dict[Plane, TensorFileWriter] = {}
        with contextlib.ExitStack() as stack:
            for plane in self._manifest.planes:
                writers[plane] = stack.enter_context(
                    TensorFileWriter(
                        self.folder / file_name(layer, plane),
                        self._manifest.specs(plane),
                        alignment=RECORD_ALIGNMENT,
                    )
                )
            for expert in records:
                for plane, writer in writers.items():
                    writer.append(expert[plane])
        for writer in writers.values():
            self._files[writer.path.name] = StoredFile(
                num_bytes=writer.num_bytes, sha256=writer.sha256
            )
        self._write_account(UNFINISHED_FILE)

    def finish(self) -> None:
        """Writes the manifest; the store is finished from then on.

        Raises:
            DiskSpaceError: The disk is full.
            PrepareError: The manifest cannot be written.
        """
        assert all(self.is_layer_done(layer) for layer in range(self._manifest.num_layers))
        self._write_account(UNFINISHED_FILE)
        with disk_errors(self.folder):
            (self.folder / UNFINISHED_FILE).replace(self.folder / MANIFEST_FILE)
            sync_folder(self.folder)

    def _write_account(self, name: str) -> None:
        files = dict(self._ordered_files())
        write_json(self.folder / name, replace(self._manifest, files=files).to_json())

    def _ordered_files(self) -> Iterator[tuple[str, StoredFile]]:
        for name in sorted(self._files):
            yield name, self._files[name]
