"""A reply under way, apart from the engine that makes it.

What has been told, the random numbers and the figures outlive an engine that ran out of
memory: another one reads the tokens again and goes on. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config import SamplingConfig
from ..model.sampling import Sampler
from .requests import Request
from .telemetry import ReplyMeter


class ReplySoFar:
    """One reply.

    Args:
        prompt: Its tokens.
        sampling: How the new ones are chosen.

    Attributes:
        history: Prompt and new tokens, which are told as soon as they are here.
        num_prompt_tokens: How many of these are the prompt.
        sampling: As given.
        sampler: Chooses the tokens.
        meter: The figures.
    """

    def __init__(self, prompt: Sequence[int], sampling: SamplingConfig) -> None:
        self.history = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.sampling = sampling
        self.sampler = Sampler(sampling)
        self.meter = ReplyMeter()

    @classmethod
    def of_request(cls, request: Request) -> ReplySoFar:
        """Goes on with what a batch has not finished; the request keeps its own history."""
        so_far = cls(request.prompt, request.sampling)
        so_far.history = list(request.history)
        so_far.sampler = request.sampler
        return so_far

    @property
    def num_new_tokens(self) -> int:
        """Tokens that were told."""
        return len(self.history) - self.num_prompt_tokens
