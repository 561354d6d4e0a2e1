"""What is simulated: rounds, made from recorded traces or from routing token by token.

A round is a draft, perhaps of no token, and the target pass after it, as in the engine.
Recorded rounds are taken as they were (`recorded_rounds`), which needs the K they were
recorded with. From a token trace rounds of any K are made (`make_rounds`): the draft's
routing is the target's with a given fidelity, and acceptance is drawn; tokens after a
rejected one are stood in for by those that follow in the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import TraceError
from ..trace import ReplyStart, RoutingTrace, TracedPass, TracedRound, read_trace
from ..types import Phase

_ARCHIVE_MAGIC = b"PK\x03\x04"

Ids = Sequence[Sequence[Sequence[int]]]
"""Chosen experts `[num_layers][num_tokens][top_k]`."""

Demand = list[tuple[int, int]]
"""Experts and how many tokens chose each, ascending by expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One draft and the target pass after it.

    Attributes:
        draft: By draft token, its choices `[num_layers][top_k]`.
        target: Choices of the target pass.
        num_accepted: Draft tokens that stood.
        starts_reply: Whether the reply before it has ended.
        is_prefill: Whether it reads a prompt and makes no token.
    """

    draft: Sequence[Sequence[Sequence[int]]]
    target: Ids
    num_accepted: int = 0
    starts_reply: bool = False
    is_prefill: bool = False

    @property
    def num_target_tokens(self) -> int:
        """Tokens of the target pass."""
        return len(self.target[0])

    @property
    def num_new_tokens(self) -> int:
        """Tokens that the round adds to the reply."""
        return 0 if self.is_prefill else self.num_accepted + 1


def demand_of(rows: Sequence[Sequence[int]]) -> Demand:
    """Counts how many tokens chose each expert of a layer."""
    return sorted(Counter(expert for row in rows for expert in row).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """Routing of texts, one token after another.

    Attributes:
        name: For tables.
        ids: Chosen experts `[num_tokens, num_layers, top_k]`.
        lengths: Tokens of each text, in order.
        num_experts: Routed experts of a layer.
        acceptance: Share of draft tokens that the target accepted, where it was recorded.
        fidelity: Share of the target's experts that the draft's routing names, likewise.
        is_num_experts_guessed: Whether the file did not say how many experts there are.
    """

    name: str
    ids: np.ndarray
    lengths: Sequence[int]
    num_experts: int
    acceptance: float | None = None
    fidelity: float | None = None
    is_num_experts_guessed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, routed experts of each, experts of a token in each."""
        return self.ids.shape[1], self.num_experts, self.ids.shape[2]

    def part(self, start: int, end: int) -> TokenTrace:
        """Returns the trace of tokens `start` to `end`; a text that is cut counts as whole."""
        bounds = np.clip(np.cumsum([0, *self.lengths]), start, end)
        lengths = [length for length in np.diff(bounds).tolist() if length]
        return replace(self, ids=self.ids[start:end], lengths=lengths)


def _holds_arrays(path: Path) -> bool:
    """Whether a file is an archive of arrays, however it is called."""
    try:
        with path.open("rb") as file:
            return file.read(4) == _ARCHIVE_MAGIC
    except OSError:
        return path.suffix == ".npz"  # Whoever reads it says what is wrong.


def read_token_trace(path: Path) -> TokenTrace:
    """Reads routing from a recorded trace, or from arrays `ids` and `seq_len` in an `.npz`.

    Raises:
        TraceError: It is neither, or damaged.
    """
    if not _holds_arrays(path):
        return token_trace(read_trace(path), path.stem)
    try:
        with np.load(path) as arrays:
            ids, lengths = arrays["ids"], arrays["seq_len"]
    except (OSError, ValueError, KeyError) as error:
        raise TraceError(
            f"The trace {path} cannot be read: {error}.", hint="It needs `ids` and `seq_len`."
        ) from None
    if ids.ndim != 3 or not ids.size or int(lengths.sum()) != len(ids):
        raise TraceError(
            f"{path.name} has ids of shape {ids.shape} for {int(lengths.sum())} tokens.",
            hint="ids must be [tokens, layers, top_k], with lengths that add up.",
        )
    # The number of experts is not in such a file; a power of two is no worse a guess.
    num_experts = 1 << int(ids.max()).bit_length()
    return TokenTrace(
        name=path.stem,
        ids=ids,
        lengths=lengths.tolist(),
        num_experts=num_experts,
        is_num_experts_guessed=True,
    )


def recorded_rounds(trace: RoutingTrace) -> Iterator[Round]:
    """Yields the rounds of a recorded trace as they were, prompts included.

    Passes whose round did not end (a reply that was broken off) are left out.
    """
    drafts: list[Ids] = []
    target: Ids | None = None
    starts_reply = False
    for item in trace.items:
        match item:
            case ReplyStart():
                drafts, target, starts_reply = [], None, True
            case TracedPass(Phase.PREFILL, ids):
                yield Round(draft=(), target=ids, starts_reply=starts_reply, is_prefill=True)
                starts_reply = False
            case TracedPass(Phase.DRAFT, ids):
                drafts.append(ids)
            case TracedPass(_, ids):
                target = ids
            case TracedRound(num_accepted=num_accepted) if target is not None:
                draft = [[layer[0] for layer in ids] for ids in drafts]
                yield Round(
                    draft=draft,
                    target=target,
                    num_accepted=num_accepted,
                    starts_reply=starts_reply,
                )
                drafts, target, starts_reply = [], None, False


def token_trace(trace: RoutingTrace, name: str) -> TokenTrace:
    """Takes the tokens that stayed out of a recorded trace, with its drafts' qualities."""
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    num_drafted = num_accepted = num_found = num_wanted = 0
    for item in recorded_rounds(trace):
        if item.starts_reply or not lengths:
            lengths.append(0)
        target = np.asarray(item.target)
        count = item.num_target_tokens if item.is_prefill else item.num_accepted + 1
        tokens.append(target[:, :count])
        lengths[-1] += count
        num_drafted += len(item.draft)
        num_accepted += item.num_accepted
        for position, drafted in enumerate(item.draft):
            for layer, chosen in enumerate(drafted):
                wanted = item.target[layer][position]
                num_found += len(set(chosen).intersection(wanted))
                num_wanted += len(wanted)
    if not tokens:
        raise TraceError(f"{name} holds no finished pass.", hint="Record a longer reply.")
    return TokenTrace(
        name=name,
        ids=np.concatenate(tokens, axis=1).transpose(1, 0, 2),
        lengths=lengths,
        num_experts=trace.header.num_experts,
        acceptance=num_accepted / num_drafted if num_drafted else None,
        fidelity=num_found / num_wanted if num_wanted else None,
    )


def blurred(rng: np.random.Generator, ids: np.ndarray, fidelity: float, num_experts: int):
    """Replaces each expert by another one with probability `1 - fidelity`.

    Args:
        rng: Draws which, and by what.
        ids: `[..., top_k]`, distinct in the last axis.
        fidelity: Share that stays.
        num_experts: To draw from; uniformly.

    Returns:
        The same shape, distinct again in the last axis.
    """
    rows = ids.reshape(-1, ids.shape[-1]).astype(np.int64)
    out = rows.copy()
    is_lost = rng.random(rows.shape) >= fidelity
    for row, column in zip(*np.nonzero(is_lost), strict=True):
        others = np.setdiff1d(np.arange(num_experts), np.concatenate([rows[row], out[row]]))
        if len(others):
            out[row, column] = rng.choice(others)
    return out.reshape(ids.shape)


def make_rounds(
    trace: TokenTrace, num_draft_tokens: int, *, acceptance: float, fidelity: float, seed: int = 0
) -> Iterator[Round]:
    """Yields rounds of a token trace.

    Args:
        trace: Routing of the target.
        num_draft_tokens: K; 0 for plain decoding.
        acceptance: Chance of a draft token to be accepted once all before it were.
        fidelity: Share of the target's experts that the draft's routing names.
        seed: The same seed gives the same rounds.
    """
    rng = np.random.default_rng(seed)
    start = 0
    for length in trace.lengths:
        end, position = start + length, start
        while position < end:
            k = min(num_draft_tokens, end - position - 1)
            num_accepted = 0
            while num_accepted < k and rng.random() < acceptance:
                num_accepted += 1
            chosen = trace.ids[position : position + k + 1]
            draft = blurred(rng, chosen[:k], fidelity, trace.num_experts) if k else chosen[:0]
            yield Round(
                draft=draft.tolist(),
                target=chosen.transpose(1, 0, 2).tolist(),
                num_accepted=num_accepted,
                starts_reply=position == start,
            )
            position += num_accepted + 1
        start = end
