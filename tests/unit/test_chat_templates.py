"""Real chat templates on a byte-level tokenizer: what each makes of the chats people have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from mira_engine.config import SamplingConfig
from mira_engine.conversing import ChatStream
from mira_engine.errors import GenerationError
from mira_engine.events import ChatMessage, Event, GenerationDone, ReplyStats, TokenDelta
from mira_engine.model.chat import ChatRenderer, end_token_ids
from mira_engine.model.reply_parts import Channels, ThinkTags, split_reply
from mira_engine.runtime.telemetry import LiveSamples
from mira_engine.types import FinishReason, ReplyPart
from tiny_models import tiny_config, tiny_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

TEMPLATES = {
    "chat_templates/GLM-4.6.jinja": "<|user|>",
    "chat_templates/Mistral-Small-3.2-24B-Instruct-2506.jinja": "</s>",
    "chat_templates/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja": "<|im_end|>",
    "chat_templates/Qwen3-Coder.jinja": "<|im_end|>",
    "chat_templates/deepseek-ai-DeepSeek-V3.1.jinja": "<｜end▁of▁sentence｜>",
    "chat_templates/google-gemma-2-2b-it.jinja": "<end_of_turn>",
    "chat_templates/ibm-granite-granite-3.3-2B-Instruct.jinja": "<|end_of_text|>",
    "chat_templates/llama-cpp-lfm2.jinja": "<|im_end|>",
    "chat_templates/microsoft-Phi-3.5-mini-instruct.jinja": "<|end|>",
    "chat_templates/openai-gpt-oss-120b.jinja": "<|return|>",
    "configs/Qwen3.5-25B-REAP-A3B-Coding/chat_template.jinja": "<|im_end|>",
    "configs/gpt-oss-20b/chat_template.jinja": "<|return|>",
}
"""Template, and the token that ends a reply in it."""

GEMMA = "chat_templates/google-gemma-2-2b-it.jinja"
MISTRAL = "chat_templates/Mistral-Small-3.2-24B-Instruct-2506.jinja"
NEMOTRON = "chat_templates/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja"
GPT_OSS = "chat_templates/openai-gpt-oss-120b.jinja"
GLM = "chat_templates/GLM-4.6.jinja"
DEEPSEEK = "chat_templates/deepseek-ai-DeepSeek-V3.1.jinja"

BOS = "<bos>"

SYSTEM = ChatMessage(role="system", content="Be brief.")
FIRST = ChatMessage(role="user", content="Two and two?")
REPLY = ChatMessage(role="assistant", content="Four.", thinking="They want a sum.")
SECOND = ChatMessage(role="user", content="And three?")
CHAT = (SYSTEM, FIRST, REPLY, SECOND)

MakeTokenizer = Callable[[str], PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tokenizer_for(shared_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeTokenizer:
    """Makes a tokenizer with a real template, whose angle-bracketed words are tokens."""
    folder = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def make(name: str) -> PreTrainedTokenizerBase:
        template = (shared_inputs / "data" / name).read_text(encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        marks = re.findall(r"<[|｜][^<>{}' ]+[|｜]>|<(?:start|end)_of_turn>", template)
        special = [BOS, TEMPLATES[name], *dict.fromkeys(marks)]
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in special])
        tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
        tokenizer.bos_token, tokenizer.eos_token = BOS, TEMPLATES[name]
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_renders_a_chat_and_keeps_its_texts(
    tokenizer_for: MakeTokenizer, name: str
) -> None:
    """Also though nobody gives it tools, documents or switches."""
    renderer = ChatRenderer(tokenizer_for(name))
    text = renderer.text(CHAT)
    for message in CHAT:
        assert message.content in text
    assert text.index("Be brief.") < text.index("Two and two?") < text.index("Four.")
    assert "They want a sum." not in text, "earlier thinking is left out"
    assert renderer.text((FIRST,))


@pytest.mark.parametrize("name", TEMPLATES)
def test_beginning_of_text_comes_once_at_most(tokenizer_for: MakeTokenizer, name: str) -> None:
    tokenizer = tokenizer_for(name)
    ids = ChatRenderer(tokenizer).render(CHAT)
    assert ids.count(tokenizer.bos_token_id) == ("bos_token" in tokenizer.chat_template)


def test_half_a_character_is_refused_by_the_chat_and_not_by_the_process(
    tokenizer_for: MakeTokenizer,
) -> None:
    renderer = ChatRenderer(tokenizer_for(GEMMA))
    with pytest.raises(GenerationError, match="half a character"):
        renderer.render((ChatMessage(role="user", content="so \ud800"),))


def test_second_beginning_of_text_is_taken_away(tokenizer_for: MakeTokenizer) -> None:
    """From tokenizers that add one though they are told not to."""
    tokenizer = tokenizer_for(GEMMA)
    once = ChatRenderer(tokenizer).render((FIRST,))
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert ChatRenderer(tokenizer).render((FIRST,)) == once


def test_refused_system_role_is_folded_into_the_first_question(
    tokenizer_for: MakeTokenizer,
) -> None:
    text = ChatRenderer(tokenizer_for(GEMMA)).text(CHAT)
    assert "<start_of_turn>user\nBe brief.\n\nTwo and two?<end_of_turn>" in text


def test_dropped_system_prompt_is_folded_too(tokenizer_for: MakeTokenizer) -> None:
    tokenizer = tokenizer_for(GEMMA)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    assert ChatRenderer(tokenizer).text((SYSTEM, FIRST)) == "[Be brief.\n\nTwo and two?]"


@pytest.mark.parametrize("name", [GEMMA, MISTRAL])
@pytest.mark.parametrize("head", [(), (SYSTEM,)])
def test_roles_that_must_alternate_are_joined(
    tokenizer_for: MakeTokenizer, name: str, head: Sequence[ChatMessage]
) -> None:
    """A question whose reply was stopped before its first word stands before the next."""
    text = ChatRenderer(tokenizer_for(name)).text([*head, FIRST, SECOND])
    assert "Two and two?\n\nAnd three?" in text
    assert ("Be brief." in text) == bool(head)


def test_templates_without_such_rules_get_the_chat_as_it_is(tokenizer_for: MakeTokenizer) -> None:
    text = ChatRenderer(tokenizer_for(NEMOTRON)).text([FIRST, SECOND])
    assert "Two and two?<|im_end|>\n<|im_start|>user\nAnd three?" in text


def test_chat_that_no_way_renders_is_an_error(tokenizer_for: MakeTokenizer) -> None:
    with pytest.raises(GenerationError, match="alternate"):
        ChatRenderer(tokenizer_for(GEMMA)).text([REPLY, FIRST])


def test_thinking_reaches_templates_that_take_it(tokenizer_for: MakeTokenizer) -> None:
    """As they would have it: here of a reply to the last question, which goes on."""
    for name in (GLM, NEMOTRON):
        text = ChatRenderer(tokenizer_for(name)).text((FIRST, REPLY))
        assert "They want a sum." in text, name


@pytest.mark.parametrize(("name", "is_open"), [(NEMOTRON, True), (DEEPSEEK, False), (GLM, False)])
def test_thinking_opened_by_the_template_is_seen(
    tokenizer_for: MakeTokenizer, name: str, is_open: bool
) -> None:
    renderer = ChatRenderer(tokenizer_for(name))
    parts = split_reply(renderer.template, renderer.text(CHAT))
    assert isinstance(parts, ThinkTags)
    assert parts.part is (ReplyPart.THINKING if is_open else ReplyPart.ANSWER)


def test_gpt_oss_is_read_by_channels(tokenizer_for: MakeTokenizer) -> None:
    renderer = ChatRenderer(tokenizer_for(GPT_OSS))
    assert isinstance(split_reply(renderer.template, renderer.text(CHAT)), Channels)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in (GLM, MISTRAL)])
def test_end_of_turn_is_known_from_the_template_alone(
    tokenizer_for: MakeTokenizer, name: str, tmp_path: Path
) -> None:
    """GLM writes nothing behind a reply, Mistral whatever the tokenizer's end of text is."""
    tokenizer = tokenizer_for(name)
    end = tokenizer.eos_token_id
    tokenizer.eos_token = "<|endoftext|>"
    ids = end_token_ids(tmp_path, tiny_config("olmoe"), tokenizer)
    assert end in ids
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ids, "the configuration's own"


def test_end_ids_of_all_sources_are_joined(tokenizer_for: MakeTokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(GPT_OSS)
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(tmp_path)
    config = tiny_config("gpt_oss")
    config.eos_token_id = [9]
    ends = {7, 8, 9, tokenizer.eos_token_id}
    assert end_token_ids(tmp_path, config, tokenizer) == ends
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in ends, "it ends a channel only"


class FakeReplier:
    """Says given tokens."""

    context_length = 4096
    longest_context = 8192

    def __init__(self, tokens: Sequence[int], end_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.end_ids = frozenset(end_ids)
        self.prompts: list[list[int]] = []

    def reply(
        self, prompt: Sequence[int], sampling: SamplingConfig
    ) -> Iterator[int | tuple[int, int]]:
        del sampling
        self.prompts.append(list(prompt))
        yield (len(prompt), len(prompt))
        yield from self.tokens
        return FinishReason.STOP

    def stats(self) -> ReplyStats:
        return ReplyStats(num_new_tokens=len(self.tokens))


def converse(tokenizer: PreTrainedTokenizerBase, reply: str) -> list[Event]:
    """Returns the events of a chat whose reply has this text."""
    tokens = tokenizer(reply, add_special_tokens=False)["input_ids"]
    replier = FakeReplier(tokens, [tokenizer.eos_token_id])
    live = LiveSamples("r", stats=replier.stats, residency=None)
    chats = ChatStream(tokenizer)
    return list(chats.stream("r", (FIRST,), SamplingConfig(), live, replier))


def text_of(events: Sequence[Event], part: ReplyPart) -> str:
    return "".join(e.text for e in events if isinstance(e, TokenDelta) and e.part is part)


@pytest.mark.parametrize(
    ("name", "reply", "thinking", "answer"),
    [
        (NEMOTRON, "A sum.\n</think>\nVier – 四.<|im_end|>", "A sum.", "Vier – 四."),
        (NEMOTRON, "A sum, not yet", "A sum, not yet", ""),
        (GLM, "\n<think>A sum.</think>\nFour.<|user|>", "A sum.", "Four."),
        (DEEPSEEK, "Four.<｜end▁of▁sentence｜>", "", "Four."),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>A sum.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Four.<|return|>",
            "A sum.",
            "Four.",
        ),
    ],
)
def test_stream_tells_thinking_from_answer(
    tokenizer_for: MakeTokenizer, name: str, reply: str, thinking: str, answer: str
) -> None:
    events = converse(tokenizer_for(name), reply)
    done = events[-1]
    assert isinstance(done, GenerationDone)
    assert (done.thinking, done.text) == (thinking, answer)
    assert text_of(events, ReplyPart.THINKING) == thinking
    assert text_of(events, ReplyPart.ANSWER) == answer
    deltas = [e for e in events if isinstance(e, TokenDelta)]
    assert sum(e.num_tokens for e in deltas) == done.stats.num_new_tokens


def test_special_tokens_that_frame_nothing_are_left_out(tokenizer_for: MakeTokenizer) -> None:
    events = converse(tokenizer_for(NEMOTRON), "a</think>b<|im_start|>c<|im_end|>")
    assert text_of(events, ReplyPart.ANSWER) == "bc"
