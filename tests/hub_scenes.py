"""The model that the tests put on their hub, how a client is led there, and the hub's faults."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hub_server
import tiny_models
import torch
from mira_engine.checkpoint.hub import Patience
from mira_engine.checkpoint.shards import INDEX_FILE
from mira_engine.errors import CheckpointError, HubAccessError, HubBusyError, HubUnreachableError
from mira_engine.library import SOURCE_FILE, ModelHome
from safetensors.torch import load_file, save_file

REPO = "owner/tiny"
SHARD = "model-00003-of-00010.safetensors"
SHORT = Patience(num_tries=2, num_asks=2, first_wait_s=0.01, longest_wait_s=1, read_timeout_s=60)
"""Gives up soon whatever fails, and waits for what a busy machine is slow to send."""

NEEDED = {
    "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "model.safetensors.index.json",
    *(f"model-{number:05}-of-00010.safetensors" for number in range(1, 11)),
}  # fmt: skip
SHARDS = tuple(sorted(name for name in NEEDED if name.startswith("model-")))


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """What the hub does with a file, and what a person reads of it."""

    faults: tuple[hub_server.Fault, ...]
    kind: type[Exception]
    words: str


def _case(kind: type[Exception], words: str, *faults: hub_server.Fault) -> FaultCase:
    return FaultCase(faults=faults, kind=kind, words=words)


TOLD_FAULTS = {
    "cut": _case(HubUnreachableError, "the connection broke",
                 hub_server.cut(0.6), hub_server.cut(0)),
    "wrong bytes": _case(CheckpointError, "wrong contents twice",
                         hub_server.wrong_bytes, hub_server.wrong_bytes),
    "stalled": _case(HubUnreachableError, "nothing came for too long",
                     hub_server.stall(0.3), hub_server.stall(0)),
    "empty": _case(HubBusyError, "empty", hub_server.empty, hub_server.empty),
    "busy, says when": _case(HubBusyError, "in 120 seconds",
                             hub_server.status(429, Retry_After="120")),
    "busy, by the other header": _case(
        HubBusyError, "in 55 seconds",
        hub_server.status(429, RateLimit='"resolvers";r=0;t=55')),
    "busy": _case(HubBusyError, "in some minutes", *[hub_server.status(429)] * 2),
    "out of order": _case(HubBusyError, "status 503", *[hub_server.status(503)] * 2),
    "address refused": _case(HubAccessError, "status 403", *[hub_server.status(403)] * 2),
}  # fmt: skip
"""Faults of one file that outlast the client's patience."""

PASSING_FAULTS = {
    "cut three times": (hub_server.cut(0.3), hub_server.cut(0.3), hub_server.cut(0.3)),
    "cut, then all of it again": (hub_server.cut(0.5), hub_server.ignores_range),
    "wrong bytes once": (hub_server.wrong_bytes,),
    "empty once": (hub_server.empty,),
    "stalled once": (hub_server.stall(0.5),),
    "out of order once": (hub_server.status(503),),
    "busy, now free": (hub_server.status(429, Retry_After="0"),),
}
"""Faults of one file that nobody needs to hear of."""


def patience_with(fault: str) -> Patience:
    """Returns a patience that ends soon with that fault; silence is one to those that stall alone,
    since a busy machine is silent, too.
    """
    return dataclasses.replace(SHORT, read_timeout_s=0.5) if "stalled" in fault else SHORT


def publish(folder: Path) -> Path:
    """Writes a repository's files: ten shards, and files that nobody should fetch."""
    tiny_models.save_tiny("qwen3_moe", folder)
    _split(folder)
    tiny_models.tiny_tokenizer(folder)
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.safetensors", "modeling_own.py"):
        (folder / name).write_bytes(b"not wanted " * 3000)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


def _split(folder: Path) -> None:
    """Splits the weights into shards of like size, the first half as large: so one of them
    holds experts of two layers.
    """
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    shard_bytes = sum(each.nbytes for each in tensors.values()) / (len(SHARDS) - 0.5)
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in SHARDS}
    done = 0
    for key in sorted(tensors):
        parts[SHARDS[int(done / shard_bytes + 0.5)]][key] = tensors[key]
        done += tensors[key].nbytes
    for name, part in parts.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {key: name for name, part in parts.items() for key in part}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    whole.unlink()


def client_settings(server: hub_server.FakeHub, folder: Path) -> dict[str, object]:
    """Returns what of `huggingface_hub.constants` leads to the server and an empty cache."""
    return {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "token"),
    }


def client_environment(server: hub_server.FakeHub, folder: Path) -> dict[str, str]:
    """Returns the variables that lead a child's client there."""
    return {
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(folder),
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "0",
    }


@contextlib.contextmanager
def forking_child(
    script: Path, server: hub_server.FakeHub, folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """A process that forks one for each preparation; the client's settings come by environment."""
    environment = os.environ | client_environment(server, folder)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()


def hashes(home: ModelHome) -> dict[str, str]:
    """SHA-256 of everything made for a model but what names its source."""
    return {
        path.relative_to(home.root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.root.rglob("*"))
        if path.is_file() and path.name not in (".lock", SOURCE_FILE)
    }


def whole_bodies(server: hub_server.FakeHub, name: str) -> list[str]:
    """Requests for a file's bytes from somewhere to its end; reads of a part are left out."""
    contents = server.repos[REPO].commits[0][1][name]
    wanted = ("GET", "lfs" if hub_server.is_large(contents) else "hub", name)
    said = [range_ for *request, range_ in server.requests if tuple(request) == wanted]
    return [each for each in said if not each or each.endswith("-")]
