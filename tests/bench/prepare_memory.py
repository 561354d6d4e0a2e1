"""How much memory and disk does preparing a large model take?

Question: by how much a process grows while it downloads and converts a checkpoint of 4 GB,
and how much of the disk is taken at the most, against what `DescribeModel` promised, with
the download kept and with each shard deleted once it is used up.

Method: a random checkpoint of the shape of a published model (qwen3_moe: hidden 2048, 128
experts of width 768, bfloat16, shards of 1 GB) on a hub of this machine. A child process
imports everything, notes its resident memory (idle), resets the kernel's high-water mark
and prepares; the mark is the peak. Resident memory counts pages of mapped files as well
(libraries above all); what of the growth is anonymous memory, the process's own, is told
apart by samples at each report of progress. The page cache is the system's and not counted.
Growth includes what transformers imports for the family on first use; with `--warm` a tiny
model of the family is prepared before. Disk is looked at before each deletion, so that its
most is exact. Bar: growth of at most one layer of the checkpoint and 300 MiB.

Left out: time; and the hub's half, which is another process. Linux only.

Run: python tests/bench/prepare_memory.py [--folder DIR]. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import hub_server
import huggingface_hub
import tiny_models
import torch
from disk_meter import DiskMeter
from hub_scenes import client_environment, client_settings
from huggingface_hub import constants
from mira_engine.checkpoint.architecture import meta_model
from mira_engine.checkpoint.preflight import SPARE_BYTES
from mira_engine.checkpoint.shards import INDEX_FILE
from mira_engine.checkpoint.writing import TensorFileWriter, write_json
from mira_engine.events import DescribeModel
from mira_engine.library import ModelLibrary
from mira_engine.model_report import describe
from mira_engine.prepare import prepare
from mira_engine.types import Precision

REPO = "owner/large"
WAYS = ("deleted", "kept")
BAR_BYTES = 300 << 20
_POOL_WEIGHTS = 8 << 20
_FIGURES = re.compile(r"^(VmHWM|VmRSS|RssAnon):\s+(\d+) kB", re.MULTILINE)


def write_checkpoint(folder: Path, arguments: argparse.Namespace) -> int:
    """Writes the checkpoint; its weights repeat a few million random ones.

    Returns:
        Bytes of the experts of one layer.
    """
    config = tiny_models.tiny_config("qwen3_moe", has_windows=False)
    config.hidden_size, config.moe_intermediate_size = arguments.hidden, arguments.width
    config.num_hidden_layers, config.num_experts = arguments.layers, arguments.experts
    config.num_experts_per_tok, config.mlp_only_layers = min(8, arguments.experts), []
    config.vocab_size, config.head_dim = arguments.vocabulary, 128
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    tiny_models.tiny_tokenizer(folder)
    pool = torch.randn(_POOL_WEIGHTS, generator=torch.Generator().manual_seed(0)) * 0.02
    write_shards(folder, checkpoint_shapes(config), pool.bfloat16(), arguments.shard_mb * 10**6)
    return 3 * arguments.experts * arguments.hidden * arguments.width * 2


def checkpoint_shapes(config) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes as the family publishes them: each expert by itself."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in meta_model(config).state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            shapes[name] = tuple(value.shape)
            continue
        prefix, _, which = name.rpartition(".")
        num_experts, rows, columns = value.shape
        parts = {"gate_proj": rows // 2, "up_proj": rows // 2}
        parts = parts if which == "gate_up_proj" else {"down_proj": rows}
        for expert in range(num_experts):
            for part, height in parts.items():
                shapes[f"{prefix}.{expert}.{part}.weight"] = (height, columns)
    return shapes


def write_shards(
    folder: Path, shapes: dict[str, tuple[int, ...]], pool: torch.Tensor, shard_bytes: int
) -> None:
    """Splits the tensors into files of about `shard_bytes`, with an index."""
    shards, size = [[]], 0
    for name, shape in shapes.items():
        num_bytes = 2 * math.prod(shape)
        if size and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    weight_map, start = {}, 0
    for number, names in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        specs = {name: (torch.bfloat16, shapes[name]) for name in names}
        with TensorFileWriter(path, specs) as writer:
            for name in names:
                left = math.prod(shapes[name])
                while left:
                    start = (start + 4099) % (_POOL_WEIGHTS // 2)
                    piece = pool[start : start + left]
                    writer.append(piece)
                    left -= len(piece)
        weight_map |= dict.fromkeys(names, path.name)
    write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})


def memory() -> dict[str, int]:
    """Returns this process's figures in bytes, by the kernel's names."""
    text = Path("/proc/self/status").read_text()
    return {name: int(kib) << 10 for name, kib in _FIGURES.findall(text)}


def run_child(arguments: argparse.Namespace) -> None:
    """Prepares the model and prints what that took; runs in a process of its own."""
    folder = Path(arguments.folder)
    if arguments.is_warm:
        tiny = tiny_models.save_tiny("qwen3_moe", folder / "tiny")
        home = ModelLibrary(folder / "warm").resolve(str(tiny))
        prepare(home, Precision(arguments.precision), on_progress=lambda *args: None)
    Path("/proc/self/clear_refs").write_text("5")
    idle, most_anonymous = memory(), 0

    def sample(*report: object) -> None:
        nonlocal most_anonymous
        most_anonymous = max(most_anonymous, memory()["RssAnon"])

    data_dir = folder / arguments.child
    meter = DiskMeter(data_dir, folder / "cache")
    with meter.watching():
        prepare(
            ModelLibrary(data_dir).resolve(REPO),
            Precision(arguments.precision),
            on_progress=sample,
            is_download_deleted=arguments.child == "deleted",
        )
    peak = memory()["VmHWM"]
    print(
        json.dumps(
            {
                "idle_rss_bytes": idle["VmRSS"],
                "peak_rss_bytes": peak,
                "growth_bytes": peak - idle["VmRSS"],
                "anonymous_growth_bytes": most_anonymous - idle["RssAnon"],
                "disk_peak_bytes": meter.most_bytes,
            }
        )
    )


def measured(way: str, server: hub_server.FakeHub, arguments: argparse.Namespace, base: Path):
    """Runs a child for one way of preparing."""
    environment = os.environ | client_environment(server, base) | {"OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, __file__, "--child", way, "--folder", str(base),
        "--precision", arguments.precision, *(["--warm"] if arguments.is_warm else []),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def described(server: hub_server.FakeHub, precision: str, base: Path) -> dict[str, int]:
    """Returns the peaks of the disk that a description gives, without the room kept beyond."""
    for name, value in client_settings(server, base).items():
        setattr(constants, name, value)
    home = ModelLibrary(base / "described").resolve(REPO)
    made = describe(home, DescribeModel(request_id="bench", model=REPO))
    huggingface_hub.close_session()
    (size,) = (each for each in made.sizes if each.precision == precision)
    assert size.peak_deleting_bytes is not None
    return {
        "kept": size.peak_bytes - SPARE_BYTES,
        "deleted": size.peak_deleting_bytes - SPARE_BYTES,
    }


def main() -> None:
    """Writes the checkpoint, measures both ways and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="Where to work; needs about 11 GB. A temporary one else.")
    parser.add_argument("--precision", default="nested")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--shard-mb", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--warm", dest="is_warm", action="store_true")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        base = Path(made)
        layer_bytes = write_checkpoint(base / "large", arguments)
        server = hub_server.FakeHub().start()
        server.add_mapped(REPO, base / "large")
        try:
            peaks = described(server, arguments.precision, base)
            found = {"layer_bytes": layer_bytes, "bar_bytes": layer_bytes + BAR_BYTES}
            for way in arguments.ways:
                row = measured(way, server, arguments, base)
                row["promised_disk_peak_bytes"] = peaks[way]
                row["disk_error"] = row["disk_peak_bytes"] / peaks[way] - 1
                row["is_within_bar"] = row["growth_bytes"] <= found["bar_bytes"]
                found[way] = row
                print(
                    f"{way}: idle {row['idle_rss_bytes'] >> 20} MiB, "
                    f"growth {row['growth_bytes'] >> 20} MiB "
                    f"(anonymous {row['anonymous_growth_bytes'] >> 20} MiB, "
                    f"bar {found['bar_bytes'] >> 20} MiB), "
                    f"disk {row['disk_peak_bytes'] >> 20} MiB, "
                    f"promised {peaks[way] >> 20} MiB ({row['disk_error']:+.2%})"
                )
        finally:
            server.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
