"""The engine as a model of lm-eval, EleutherAI's evaluation harness.

    python -m mira_engine.lm_eval run --model mira --model_args pretrained=builtin --tasks ...

Needs `mira-chat[lm-eval]`. This is lm-eval's own command line with the model in it; versions
of lm-eval that look for entry points know the model without that. The engine runs in lm-eval's
process, and answers one request after another. This module owns what lm-eval's strings mean in
tokens.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import platformdirs
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from .config import EngineConfig, MemoryAmount, SamplingConfig
from .errors import ConfigError, GenerationError
from .evaluation import open_scorer
from .fidelity.measures import log_likelihood
from .fidelity.texts import WINDOW_TOKENS, lead_tokens
from .library import ModelLibrary
from .memory_retry import load_with_retry
from .model.chat import Detokeniser, has_tokenizer, load_tokenizer
from .types import CompileMode, ComputeDtype, Precision

DEFAULT_GENERATED_TOKENS = 256
"""Most tokens of an answer where the task does not say, lm-eval's own default."""


_Choice = TypeVar("_Choice", bound=enum.StrEnum)


class Request(Protocol):
    """lm-eval's `Instance`, as far as a model sees it."""

    args: tuple


@register_model("mira")
class MiraLM(LM):
    """A prepared model of mira-chat.

    Args:
        pretrained: As `mira-chat run --model` takes it; prepared in `precision`.
        precision: Expert format.
        dtype: Arithmetic.
        budget: Memory for experts, `300MiB` or `75%`; `None` takes the model's default.
        k: Tokens to draft in generation; the answers are the same with any.
        max_length: Most tokens of one request, `None` for the model's context up to 8192.
        max_gen_toks: Most tokens of an answer where the task does not say.
        data_dir: Where models are, `None` for where the program keeps them.
        batch_size: Taken because lm-eval gives it, as are the next two; requests run in turn.
        max_batch_size: See `batch_size`.
        device: See `batch_size`.

    Raises:
        ConfigError: A value cannot be used.
        StoreError: The model is not prepared in that precision; names the command.
        BudgetError: There is no memory for it.
    """

    def __init__(
        self,
        pretrained: str = "builtin",
        *,
        precision: str = "nested",
        dtype: str = "bfloat16",
        budget: str | None = None,
        k: int = 0,
        max_length: int | None = None,
        max_gen_toks: int = DEFAULT_GENERATED_TOKENS,
        data_dir: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
    ) -> None:
        super().__init__()
        del batch_size, max_batch_size, device
        self._home = ModelLibrary(_data_dir(data_dir)).resolve(str(pretrained))
        config = EngineConfig(
            precision=_choice(Precision, "precision", precision),
            dtype=_choice(ComputeDtype, "dtype", dtype),
            budget=MemoryAmount.parse(str(budget)) if budget is not None else None,
            num_draft_tokens=k,
            context_length=max_length,
            prefill_chunk_tokens=WINDOW_TOKENS,
            compile_mode=CompileMode.OFF,
        )
        self._engine = load_with_retry(self._home, config)
        self._scorer = open_scorer(self._engine, WINDOW_TOKENS)
        self._max_gen_toks = int(max_gen_toks)
        if not has_tokenizer(self._home.backbone_dir):
            raise GenerationError("The model has no tokenizer.", hint="Download it whole.")
        self._tokenizer = load_tokenizer(self._home.backbone_dir)
        self._lead = lead_tokens(self._tokenizer)

    def close(self) -> None:
        """Gives the engine's memory back."""
        self._engine.close()

    # -- lm-eval's requests ----------------------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns for each context and continuation how likely the latter is behind the former.

        Requests that begin alike, as the choices of one question do, run behind each other, so
        that what they share is read once.
        """
        del disable_tqdm
        pairs = [self._encode_pair(*request.args) for request in requests]
        results: dict[int, tuple[float, bool]] = {}
        for number in sorted(range(len(pairs)), key=lambda one: (*pairs[one], one)):
            results[number] = self._score(*pairs[number])
            self.cache_hook.add_partial("loglikelihood", requests[number].args, results[number])
        return [results[number] for number in range(len(pairs))]

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns how likely each whole text is."""
        del disable_tqdm
        results = []
        for request in requests:
            (text,) = request.args
            pieces = rolling_windows(
                self._plain(text), self._prefix_token, self._engine.context_length
            )
            results.append(sum(self._score(*piece)[0] for piece in pieces))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Returns an answer to each context, up to the first of the task's end marks."""
        del disable_tqdm
        results = []
        for request in requests:
            context, wishes = request.args
            results.append(self._generate(context, wishes))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    # -- chats -----------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval keeps requests that it has rendered."""
        return self._home.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the model's chat template, empty where none is wanted."""
        return str(self._tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a chat, ready for the assistant's turn or to go on with its last message."""
        return self._tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # -- tokens ----------------------------------------------------------------------------

    @property
    def _prefix_token(self) -> int:
        """What an empty context is: the beginning of a text, or the end of one before it."""
        found = self._tokenizer.bos_token_id
        return found if found is not None else min(self._engine.end_ids)

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(self, text: str) -> tuple[int, ...]:
        """Returns a text's tokens behind what the tokenizer puts before every text."""
        tokens, lead = self._plain(text), self._lead
        return tokens if tokens[: len(lead)] == lead else lead + tokens

    def _encode_pair(
        self, context: str, continuation: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns both as tokens, divided where the context ends in the tokens of the whole.

        Spaces at the end of the context belong to the continuation: tokens begin with them.
        """
        stripped = context.rstrip()
        if not stripped:
            return (self._prefix_token,), self._plain(context + continuation)
        whole = self._encode(context + continuation)
        num_context = len(self._encode(stripped))
        return whole[:num_context], whole[num_context:]

    def _score(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
        """Returns log-probability and whether it is the greedy continuation.

        Where both together are too long for the context, its beginning is left out.
        """
        tokens = (context + continuation)[-(self._engine.context_length + 1) :]
        first = max(1, len(tokens) - len(continuation)) - 1
        total, is_greedy = 0.0, True
        for start, logits in self._scorer.rows(tokens[:-1], first):
            targets = tokens[start + 1 : start + 1 + len(logits)]
            found, is_likeliest = log_likelihood(logits, targets)
            total, is_greedy = total + found, is_greedy and is_likeliest
        return total, is_greedy

    def _generate(self, context: str, wishes: Mapping[str, object]) -> str:
        sampling = _sampling(wishes, self._max_gen_toks)
        ends = _end_marks(wishes)
        room = max(1, self._engine.context_length - (sampling.max_new_tokens or 1))
        prompt = (self._encode(context) or (self._prefix_token,))[-room:]
        text = ""
        with contextlib.closing(self._pieces(prompt, sampling)) as pieces:
            for piece in pieces:
                text += piece
                found = [place for end in ends if (place := text.find(end)) >= 0]
                if found:
                    return text[: min(found)]
        return text

    def _pieces(
        self, prompt: Sequence[int], sampling: SamplingConfig
    ) -> Generator[str, None, None]:
        detokeniser = Detokeniser(self._tokenizer)
        with contextlib.closing(self._engine.reply(prompt, sampling)) as steps:
            for step in steps:
                if isinstance(step, int) and step not in self._engine.end_ids:
                    yield detokeniser.push(step)
        yield detokeniser.flush()


def rolling_windows(
    tokens: Sequence[int], prefix_token: int, size: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a text into contexts and continuations; each token is in one continuation.

    The last continuation is shorter where need be, and has as much context before it as fits.

    Args:
        tokens: The text.
        prefix_token: Stands before it.
        size: Most tokens that are read in one piece.
    """
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        context = tokens[end - size - 1 : start] if start else (prefix_token,)
        yield tuple(context), tuple(tokens[start:end])


def _sampling(wishes: Mapping[str, object], max_tokens: int) -> SamplingConfig:
    """Reads a task's generation settings; without `do_sample` or a temperature it is greedy."""
    temperature = float(wishes.get("temperature") or 0.0)
    if wishes.get("do_sample") is False:
        temperature = 0.0
    elif wishes.get("do_sample") and not wishes.get("temperature"):
        temperature = 1.0
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens"):
        max_tokens = int(wishes.get(name) or max_tokens)
    return SamplingConfig(
        temperature=temperature,
        top_k=int(wishes.get("top_k") or 0),
        top_p=float(wishes.get("top_p") or 1.0),
        max_new_tokens=max_tokens,
    )


def _end_marks(wishes: Mapping[str, object]) -> tuple[str, ...]:
    until = wishes.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(mark for mark in until if mark)


def _data_dir(given: str | None) -> Path:
    """Where the program keeps its models; the app, which decides that, is not known here."""
    path = given or os.environ.get("MIRA_CHAT_DATA_DIR")
    if path:
        return Path(path).expanduser().absolute()
    return Path(platformdirs.user_data_dir("mira-chat", appauthor=False))


def _choice(kind: type[_Choice], name: str, value: object) -> _Choice:
    try:
        return kind(str(value))
    except ValueError:
        raise ConfigError.for_field(name, value, f"Choose among {', '.join(kind)}.") from None


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
