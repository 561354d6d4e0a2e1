"""Requests of a batch: what was asked, what has come of it, and how each one ended.

Knows no cache and no pass. `in_turn` answers requests one after another where a model
cannot answer them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ..config import SamplingConfig
from ..errors import ConfigError, ContextLengthError
from ..model.sampling import Sampler
from ..types import FinishReason

MAX_REQUESTS = 32
"""Largest batch. Source: Specter, batched execution (B = 1 to 32)."""


@dataclass(frozen=True, slots=True)
class BatchToken:
    """A new token of a request, the end of text included."""

    request: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """How a request ended. One comes for each request, when it ends.

    Attributes:
        request: Its number, in the order of the prompts from 0.
        tokens: All new tokens.
        reason: Why it ended.
        ttft_s: Seconds from the start of the batch to its first token, 0 without one.
        decode_s: Seconds from its first token to its last.
    """

    request: int
    tokens: tuple[int, ...]
    reason: FinishReason
    ttft_s: float
    decode_s: float

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first, 0 where there is none."""
        return self.decode_s / (len(self.tokens) - 1) if len(self.tokens) > 1 else 0.0


BatchEvent = BatchToken | RequestResult


class Request:
    """One request while it is answered.

    Args:
        number: Its place among the prompts.
        prompt: Its tokens.
        sampling: As for a single reply.
        room: Tokens that the context holds after the prompt.
    """

    def __init__(
        self, number: int, prompt: Sequence[int], sampling: SamplingConfig, room: int
    ) -> None:
        self.number = number
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.sampler = Sampler(sampling)
        self.history = list(prompt)
        """Prompt and new tokens."""
        self.reason: FinishReason | None = None
        """Why it ended, `None` while it runs."""
        self._room = room
        self._limit = min(room, sampling.max_new_tokens or room)
        self._started_at = time.perf_counter()
        self._first_at: float | None = None
        self._last_at = 0.0

    @property
    def num_left(self) -> int:
        """New tokens that may still come."""
        return self._limit - (len(self.history) - len(self.prompt))

    @property
    def max_tokens(self) -> int:
        """Most tokens of prompt and answer."""
        return len(self.prompt) + self._limit

    def start_clock(self) -> None:
        """The work on it begins now, unless it has given a token already."""
        if self._first_at is None:
            self._started_at = time.perf_counter()

    def take(self, token: int, end_ids: Collection[int]) -> None:
        """Adds a new token, and ends the request where it is the last."""
        now = time.perf_counter()
        self._first_at = now if self._first_at is None else self._first_at
        self._last_at = now
        self.history.append(token)
        if token in end_ids:
            self.reason = FinishReason.STOP
        elif not self.num_left:
            is_full = self._limit == self._room
            self.reason = FinishReason.CONTEXT if is_full else FinishReason.LENGTH

    def result(self) -> RequestResult:
        """Returns how it ended."""
        assert self.reason is not None
        first = self._first_at
        return RequestResult(
            request=self.number,
            tokens=tuple(self.history[len(self.prompt) :]),
            reason=self.reason,
            ttft_s=first - self._started_at if first is not None else 0.0,
            decode_s=self._last_at - first if first is not None else 0.0,
        )


def make_requests(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig | Sequence[SamplingConfig],
    context_length: int,
) -> list[Request]:
    """Checks prompts and returns their requests.

    Args:
        prompts: 1 to 32 token lists.
        sampling: For all, or one for each.
        context_length: Tokens that one request may have, prompt and answer.

    Raises:
        ConfigError: No prompt, too many, an empty one, or not one sampling for each.
        ContextLengthError: A prompt leaves no room for an answer.
    """
    if not 1 <= len(prompts) <= MAX_REQUESTS:
        raise ConfigError.for_field(
            "number of prompts", len(prompts), f"Give 1 to {MAX_REQUESTS} prompts."
        )
    if isinstance(sampling, SamplingConfig):
        sampling = [sampling] * len(prompts)
    if len(sampling) != len(prompts):
        raise ConfigError.for_field(
            "number of samplings", len(sampling), f"Give one for all, or {len(prompts)}."
        )
    requests = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError.for_field(f"prompt {number}", prompt, "Give at least one token.")
        room = context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"Prompt {number} has {len(prompt)} tokens, the context holds {context_length}.",
                hint="Shorten it, or give a larger --context.",
            )
        requests.append(Request(number, prompt, sampling[number], room))
    return requests


def in_turn(
    requests: Sequence[Request],
    reply: Callable[[Request], Iterator[int | tuple[int, int]]],
) -> Iterator[BatchEvent]:
    """Answers requests one after another; after a cancel no further one is begun.

    Args:
        requests: Fresh ones, or such as a batch could not finish.
        reply: Answers one, or what is left of it: yields its tokens among others things,
            returns why it ended.
    """
    reason: FinishReason | None = None
    for request in requests:
        request.start_clock()
        if reason is not FinishReason.CANCELLED:
            steps = reply(request)
            while True:
                try:
                    step = next(steps)
                except StopIteration as stop:
                    reason = stop.value
                    break
                if isinstance(step, int):
                    request.take(step, ())
                    yield BatchToken(request.number, step)
        request.reason = reason
        yield request.result()
