"""What `mira-chat bench` measures: whole replies on the chosen model, as a person gets them.

Greedy replies to prompts that ship with the program, after one that warms caches up and
is not counted. Medians, since one disturbed reply says nothing. Through the engine process
and its pipe, so the app's share is in the figures.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mira_engine.api import ChatMessage, ModelLoaded, ReplyStats, SamplingConfig, to_plain

from .answer import Answer, Answerer, ReplyStreams
from .figures import NO_DRAFT, derived

NUM_PROMPTS, NUM_PROMPTS_QUICK = 10, 3
NUM_TOKENS, NUM_TOKENS_QUICK = 64, 24

FIGURES = {
    "ttft_s": "TTFT, s",
    "tokens_per_s": "tok/s",
    "hit_rate": "hit rate",
    "stall_ms_per_token": "stall, ms/token",
    "acceptance_rate": "acceptance",
}
"""What is told of each reply, and its heading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReply:
    """One measured reply."""

    kind: str
    prompt: str
    stats: ReplyStats

    @property
    def figures(self) -> dict[str, float | None]:
        """The figures of `FIGURES`; `None` for the acceptance where nothing was drafted."""
        known = {**derived(self.stats), "ttft_s": self.stats.ttft_s}
        return {name: known[name] for name in FIGURES}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All replies, and the model that gave them."""

    loaded: ModelLoaded
    replies: tuple[BenchReply, ...]

    @property
    def medians(self) -> dict[str, float | None]:
        """The median of each figure over the replies that have it."""
        return {name: self._median(name) for name in FIGURES}

    def _median(self, name: str) -> float | None:
        values = [value for reply in self.replies if (value := reply.figures[name]) is not None]
        return statistics.median(values) if values else None

    def lines(self) -> list[str]:
        """Returns a table: a row for each reply, the medians last."""
        lines = [
            f"{self.loaded.title}, loaded in {self.loaded.load_s:.1f} s",
            "  ".join([f"{'prompt':<14}", f"{'tokens':>6}", *FIGURES.values()]),
        ]
        for reply in self.replies:
            lines.append(_row(reply.kind, str(reply.stats.num_new_tokens), reply.figures))
        return [*lines, _row("median", "", self.medians)]

    def to_json(self) -> str:
        """Returns all of it as one JSON object, ASCII only."""
        replies = [
            {
                "kind": each.kind,
                "prompt": each.prompt,
                **each.figures,
                "stats": to_plain(each.stats),
            }
            for each in self.replies
        ]
        return json.dumps(
            {
                "model": self.loaded.model,
                "title": self.loaded.title,
                "load_s": self.loaded.load_s,
                "medians": self.medians,
                "replies": replies,
            }
        )


def bench_prompts(count: int) -> list[tuple[str, str]]:
    """Returns shipped prompts with their kinds; kinds take turns."""
    file = importlib.resources.files("mira_assets") / "profile_prompts.json"
    kinds: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
    most = max(map(len, kinds.values()))
    turns = [
        (kind, texts[i]) for i in range(most) for kind, texts in kinds.items() if i < len(texts)
    ]
    return turns[:count]


def measure(
    answerer: Answerer,
    sampling: SamplingConfig,
    *,
    is_quick: bool,
    system_prompt: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Loads the model and measures.

    Args:
        answerer: Talks to the engine.
        sampling: Taken as it is but for temperature 0 and the number of tokens.
        is_quick: Fewer and shorter replies.
        system_prompt: As in a chat.
        say: Told what is measured next.

    Raises:
        MiraError: Something failed.
        KeyboardInterrupt: The person interrupted.
    """
    loaded = answerer.load(Answer())
    sampling = dataclasses.replace(
        sampling,
        temperature=0.0,
        max_new_tokens=NUM_TOKENS_QUICK if is_quick else NUM_TOKENS,
    )

    def reply_to(text: str) -> ReplyStats:
        roles = (("system", system_prompt), ("user", text))
        answer = Answer(loaded=loaded)
        messages = [ChatMessage(role=role, content=each) for role, each in roles if each]
        answerer.reply(messages, sampling, answer, ReplyStreams(None))
        return answer.stats

    prompts: Sequence[tuple[str, str]] = bench_prompts(
        NUM_PROMPTS_QUICK if is_quick else NUM_PROMPTS
    )
    say("bench: a reply to warm up")
    reply_to(prompts[-1][1])
    replies = []
    for number, (kind, text) in enumerate(prompts, 1):
        say(f"bench: {number} of {len(prompts)} · {kind}")
        replies.append(BenchReply(kind=kind, prompt=text, stats=reply_to(text)))
    return BenchReport(loaded=loaded, replies=tuple(replies))


def _row(name: str, tokens: str, figures: dict[str, float | None]) -> str:
    cells = [f"{name:<14}", f"{tokens:>6}"]
    for key, heading in FIGURES.items():
        cells.append(f"{_cell(key, figures[key]):>{len(heading)}}")
    return "  ".join(cells)


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return NO_DRAFT
    return f"{value:.1%}" if key in ("hit_rate", "acceptance_rate") else f"{value:.2f}"
