"""lm-eval's view of the engine. Without the package, a stand-in has its place: the base class
and the decorator, which is all that the adapter takes of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mira_engine.errors import ConfigError, StoreError
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Precision
from transformers import AutoModelForCausalLM

ADAPTER = "mira_engine.lm_eval"
QUESTION = "The first tiny model said: "


class StandInHook:
    """Takes results for lm-eval's cache."""

    def add_partial(self, kind: str, arguments: tuple, result: object) -> None:
        del kind, arguments, result


class StandInLM:
    """What lm-eval's base class does when it is made."""

    def __init__(self) -> None:
        self.cache_hook = StandInHook()


@pytest.fixture(scope="module")
def adapter() -> Iterator[ModuleType]:
    """The adapter, on the real package where it is installed."""
    planted: list[str] = [ADAPTER]
    if importlib.util.find_spec("lm_eval") is None:
        registered: dict[str, type] = {}

        def register_model(name: str) -> Callable[[type], type]:
            return lambda cls: registered.setdefault(name, cls)

        api = {"model": {"LM": StandInLM}, "registry": {"register_model": register_model}}
        for name in ("lm_eval", "lm_eval.api"):
            sys.modules[name] = ModuleType(name)
            planted.append(name)
        for name, content in api.items():
            module = ModuleType(f"lm_eval.api.{name}")
            vars(module).update(content)
            sys.modules[module.__name__] = module
            planted.append(module.__name__)
    yield importlib.import_module(ADAPTER)
    for name in planted:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory, tiny_checkpoint) -> Path:
    folder = tmp_path_factory.mktemp("lm-eval")
    home = ModelLibrary(folder).resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(home, Precision.FLOAT32, on_progress=lambda *_: None)
    return folder


@pytest.fixture(scope="module")
def make(adapter, data_folder, tiny_checkpoint) -> Iterator[Callable[..., object]]:
    made = []

    def build(**wishes: object) -> object:
        given = {
            "pretrained": str(tiny_checkpoint("olmoe", tokenizer=True)),
            "precision": "float32", "dtype": "float32", "budget": "800%",
            "data_dir": str(data_folder), "batch_size": 1, "device": None,
        }  # fmt: skip
        made.append(adapter.MiraLM(**given | wishes))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def model(make):
    return make()


@pytest.fixture(scope="module")
def likelihood(tiny_checkpoint) -> Callable[[bytes, bytes], tuple[float, bool]]:
    """transformers' own: log-probability of the second text behind the first."""
    oracle = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint("olmoe", tokenizer=True), dtype=torch.float32
    ).eval()

    @torch.inference_mode()
    def score(context: tuple[int, ...], text: bytes) -> tuple[float, bool]:
        tokens = [*context, *text]
        logits = oracle(input_ids=torch.tensor([tokens])).logits[0, len(context) - 1 : -1]
        rows, chosen = logits.double().log_softmax(-1), torch.tensor(list(text))
        found = rows.gather(1, chosen[:, None]).sum().item()
        return found, torch.equal(rows.argmax(-1), chosen)

    return score


def asked(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def test_likelihoods_equal_transformers_own_in_the_order_of_the_requests(model, likelihood):
    pairs = [
        (QUESTION, "yes"),
        ("", "Something else"),
        (QUESTION.rstrip(), " no, it did not"),
        (QUESTION, "maybe"),
        ("\n", "x"),
    ]
    found = model.loglikelihood([asked(*pair) for pair in pairs])
    question = tuple(QUESTION.rstrip().encode())
    expected = [
        likelihood(question, b" yes"),
        likelihood((256,), b"Something else"),
        likelihood(question, b" no, it did not"),
        likelihood(question, b" maybe"),
        likelihood((256,), b"\nx"),
    ]
    for (logprob, is_greedy), (true, is_true_greedy) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(true, rel=1e-5)
        assert is_greedy is is_true_greedy is False


def test_greedy_continuation_is_told_as_greedy(model, likelihood):
    text = model.generate_until([asked(QUESTION, {"until": [], "max_gen_toks": 12})])[0]
    # Bytes that are no text come back as a replacement character: only ASCII can be asked again.
    greedy = text.encode()[:4] if text.isascii() else b""
    for length in range(1, len(greedy)):
        ((logprob, is_greedy),) = model.loglikelihood(
            [asked(QUESTION + text[:length], text[length])]
        )
        assert is_greedy
        assert logprob < 0


def test_what_requests_share_is_read_once(model, monkeypatch):
    passes, sizes = model._engine.passes, []
    forward = passes.forward

    def count(tokens, phase, **wishes):
        sizes.append(len(tokens))
        return forward(tokens, phase, **wishes)

    monkeypatch.setattr(passes, "forward", count)
    model._engine.state.reset()
    contexts = [QUESTION.rstrip(), "Another question altogether:"]
    model.loglikelihood([asked(one, answer) for answer in (" a", " b", " c") for one in contexts])
    assert sum(sizes) == sum(len(one) + 1 + 2 * 2 for one in contexts)


def test_rolling_windows_predict_each_token_once_with_all_context_that_fits(adapter):
    found = list(adapter.rolling_windows(range(10), -1, 4))
    assert found == [((-1,), (0, 1, 2, 3)), ((3,), (4, 5, 6, 7)), ((5, 6, 7), (8, 9))]
    assert list(adapter.rolling_windows(range(4), -1, 4)) == [((-1,), (0, 1, 2, 3))]
    assert not list(adapter.rolling_windows((), -1, 4))


def test_rolling_likelihood_of_a_text_longer_than_the_context(make, likelihood):
    short, text = make(max_length=32), "a text that is longer than the context of this model"
    (found,) = short.loglikelihood_rolling([asked(text)])
    data = text.encode()
    first, _ = likelihood((256,), data[:32])
    second, _ = likelihood(tuple(data[len(data) - 33 : 32]), data[32:])
    assert found == pytest.approx(first + second, rel=1e-5)


def test_context_that_is_too_long_loses_its_beginning(make, likelihood):
    short = make(max_length=32)
    ((found, _),) = short.loglikelihood([asked("x" * 50, "yz")])
    expected, _ = likelihood(tuple(b"x" * 31), b"yz")
    assert found == pytest.approx(expected, rel=1e-5)


def test_generation_ends_before_the_first_end_mark(model):
    wishes = {"until": ["never comes"], "max_gen_toks": 24, "do_sample": False, "temperature": 0}
    whole = model.generate_until([asked(QUESTION, wishes)])[0]
    assert len(whole) > 4
    mark = whole[3]
    cut = model.generate_until([asked(QUESTION, wishes | {"until": [whole[4:], mark]})])[0]
    assert cut == whole[: whole.index(mark)]
    assert model.generate_until([asked(QUESTION, wishes | {"until": mark})]) == [cut]
    assert model.generate_until([asked(QUESTION, wishes)])[0] == whole


def test_drafting_does_not_change_what_is_generated(make, data_folder, tiny_checkpoint, model):
    wishes = {"until": [], "max_gen_toks": 16}
    plain = model.generate_until([asked(QUESTION, wishes)])
    assert make(k=3).generate_until([asked(QUESTION, wishes)]) == plain


@pytest.mark.parametrize(
    ("wishes", "temperature", "max_tokens"),
    [
        ({}, 0.0, 256),
        ({"do_sample": True}, 1.0, 256),
        ({"do_sample": False, "temperature": 0.7}, 0.0, 256),
        ({"temperature": 0.7, "max_gen_toks": 9}, 0.7, 9),
    ],
)
def test_wishes_of_a_task_are_read(adapter, wishes, temperature, max_tokens):
    found = adapter._sampling(wishes, 256)
    assert (found.temperature, found.max_new_tokens) == (temperature, max_tokens)


def test_chat_template_is_the_models_own(model):
    chat = [{"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(chat) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "im_start" in model.chat_template(True)
    assert model.chat_template(False) == ""
    assert "/" not in model.tokenizer_name


def test_precision_that_is_unknown_or_unprepared_is_refused(make):
    with pytest.raises(ConfigError, match="precision cannot be 'int3'"):
        make(precision="int3")
    with pytest.raises(StoreError, match="not prepared in nested"):
        make(precision="nested")
