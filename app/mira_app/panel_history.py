"""What the live panels show, collected in one place. Pure: figures in, one snapshot out.

`PanelHistory` takes the engine's figures as they come, keeps what each interval between two
of them brought, and makes the `PanelState` that every panel draws from. It has no clock:
the engine says how old its figures are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from mira_engine.api import MemoryPlan, Notice, ReplyStats, ResidencySample

from .remote.figures import ServerFigures

MAX_RECENT = 60
"""Intervals of the short history."""

MAX_SESSION = 240
"""Intervals of the whole session; when it is full, neighbours are added together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Routed tokens by what served them."""

    num_hot: int = 0
    num_stage: int = 0
    num_missed: int = 0

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return self.num_hot + self.num_stage + self.num_missed

    @property
    def shares(self) -> tuple[float, float, float] | None:
        """HOT, STAGE and MISS as parts of 1; `None` where nothing was routed."""
        total = self.num_tokens
        if not total:
            return None
        return self.num_hot / total, self.num_stage / total, self.num_missed / total

    def __add__(self, other: Served) -> Served:
        return Served(
            num_hot=self.num_hot + other.num_hot,
            num_stage=self.num_stage + other.num_stage,
            num_missed=self.num_missed + other.num_missed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Where the seconds after the first token went; no second is in two parts.

    Attributes:
        ahead_s: Waiting for records that were already on their way.
        missed_s: Waiting where one was not.
        draft_s: Drafting.
        verify_s: Target passes, waiting and sampling left out.
        sample_s: Judging the draft and choosing the next token.
        other_s: The rest: what lies between the passes, and what took the text.
    """

    ahead_s: float = 0.0
    missed_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    other_s: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """Seconds in the order of the attributes."""
        return (
            self.ahead_s,
            self.missed_s,
            self.draft_s,
            self.verify_s,
            self.sample_s,
            self.other_s,
        )

    @property
    def total_s(self) -> float:
        """All of them."""
        return sum(self.parts)

    def __add__(self, other: TimeSplit) -> TimeSplit:
        ahead, missed, draft, verify, sample, rest = (
            a + b for a, b in zip(self.parts, other.parts, strict=True)
        )
        return TimeSplit(
            ahead_s=ahead,
            missed_s=missed,
            draft_s=draft,
            verify_s=verify,
            sample_s=sample,
            other_s=rest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What a stretch of a reply brought.

    Attributes:
        seconds: Its length, prefill included.
        num_tokens: Tokens generated.
        num_bytes: Bytes moved, prefill included.
        num_rounds: Draft and verify rounds.
        num_drafted: Draft tokens proposed.
        num_accepted: Draft tokens accepted.
        served: Routed tokens by what served them.
        time: Where the time after the first token went.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    served: Served = field(default_factory=Served)
    time: TimeSplit = field(default_factory=TimeSplit)

    @classmethod
    def between(cls, before: ReplyStats, after: ReplyStats) -> Interval:
        """Returns what came between two looks at one reply."""

        def gain(name: str) -> float:
            read = attrgetter(name)
            return max(0, read(after) - read(before))

        stage, stall, ahead = gain("num_stage_hits"), gain("stall_s"), gain("prefetch_stall_s")
        draft, verify, sample = gain("draft_s"), gain("verify_s"), gain("sample_s")
        return cls(
            seconds=max(0.0, age_s(after) - age_s(before)),
            num_tokens=int(gain("num_new_tokens")),
            num_bytes=int(gain("bytes_moved") + gain("prefill_bytes_moved")),
            num_rounds=int(gain("num_rounds")),
            num_drafted=int(gain("num_drafted")),
            num_accepted=int(gain("num_accepted")),
            served=Served(
                num_hot=int(gain("num_hits") - stage),
                num_stage=int(stage),
                num_missed=int(gain("num_misses")),
            ),
            time=TimeSplit(
                ahead_s=ahead,
                missed_s=max(0.0, stall - ahead),
                draft_s=draft,
                # A round that was stopped has counted its waits, and not its pass.
                verify_s=max(0.0, verify - stall - sample),
                sample_s=sample,
                other_s=max(0.0, gain("decode_s") - draft - max(verify, stall + sample)),
            ),
        )

    @property
    def tokens_per_s(self) -> float:
        """Rate of tokens, prefill included."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def link_bytes_per_s(self) -> float:
        """Rate at which records were moved."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    @property
    def accepted_per_round(self) -> float | None:
        """Mean accepted draft tokens of a round; `None` where nothing was drafted."""
        has_draft = self.num_rounds and self.num_drafted
        return self.num_accepted / self.num_rounds if has_draft else None

    @property
    def drafted_per_round(self) -> float | None:
        """Mean proposed draft tokens of a round; `None` where nothing was drafted."""
        has_draft = self.num_rounds and self.num_drafted
        return self.num_drafted / self.num_rounds if has_draft else None

    @property
    def ms_per_token(self) -> tuple[float, ...] | None:
        """`time` in milliseconds of each token; `None` without one."""
        if not self.num_tokens:
            return None
        return tuple(1e3 * part / self.num_tokens for part in self.time.parts)

    def __add__(self, other: Interval) -> Interval:
        return Interval(
            seconds=self.seconds + other.seconds,
            num_tokens=self.num_tokens + other.num_tokens,
            num_bytes=self.num_bytes + other.num_bytes,
            num_rounds=self.num_rounds + other.num_rounds,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            served=self.served + other.served,
            time=self.time + other.time,
        )


def age_s(stats: ReplyStats) -> float:
    """Seconds from a reply's request to these figures."""
    return stats.elapsed_s or stats.ttft_s + stats.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelState:
    """Everything the panels show.

    Attributes:
        stats: Of the running or the last reply.
        plan: Of the loaded model.
        notices: Fallbacks in force.
        link_bytes_per_s: What the link can do; 0 where unknown.
        residency: The last picture of the cache.
        server: What the server that runs the model reports; `None` where the engine here does.
        recent: The last intervals, `MAX_RECENT` at most.
        session: All replies since the start, in `MAX_SESSION` intervals at most.
    """

    stats: ReplyStats = field(default_factory=ReplyStats)
    plan: MemoryPlan | None = None
    notices: tuple[Notice, ...] = ()
    link_bytes_per_s: float = 0.0
    residency: ResidencySample | None = None
    server: ServerFigures | None = None
    recent: tuple[Interval, ...] = ()
    session: tuple[Interval, ...] = ()

    @property
    def reply(self) -> Interval:
        """All of the running or the last reply as one interval."""
        return Interval.between(ReplyStats(), self.stats)

    def recent_values(self, read: Callable[[Interval], float | None]) -> list[float]:
        """Returns a figure of the short history, intervals without it left out."""
        values = (read(interval) for interval in self.recent)
        return [value for value in values if value is not None]


class PanelHistory:
    """Makes snapshots of what it is told, and remembers."""

    def __init__(self) -> None:
        self._last = ReplyStats()
        self._recent: tuple[Interval, ...] = ()
        self._session: tuple[Interval, ...] = ()
        self._per_point = 1
        self._num_in_last_point = 0
        self._state = PanelState()

    def snapshot(
        self,
        stats: ReplyStats,
        *,
        plan: MemoryPlan | None = None,
        notices: Sequence[Notice] = (),
        link_bytes_per_s: float = 0.0,
        residency: ResidencySample | None = None,
        server: ServerFigures | None = None,
    ) -> PanelState:
        """Takes the figures of now.

        Returns:
            What the panels show; the very same object where nothing changed.
        """
        if stats is not self._last:
            self._take(stats)
        state = PanelState(
            stats=stats,
            plan=plan,
            notices=tuple(notices),
            link_bytes_per_s=link_bytes_per_s,
            residency=residency,
            server=server,
            recent=self._recent,
            session=self._session,
        )
        if state != self._state:
            self._state = state
        return self._state

    def _take(self, stats: ReplyStats) -> None:
        before, self._last = self._last, stats
        if age_s(stats) < age_s(before) or stats.num_new_tokens < before.num_new_tokens:
            before = ReplyStats()
        interval = Interval.between(before, stats)
        if not interval.seconds:
            return
        self._recent = (*self._recent, interval)[-MAX_RECENT:]
        self._remember(interval)

    def _remember(self, interval: Interval) -> None:
        """Adds to the session; twice as much to each point whenever it is full."""
        points = self._session
        if points and self._num_in_last_point < self._per_point:
            self._num_in_last_point += 1
            self._session = (*points[:-1], points[-1] + interval)
            return
        if len(points) >= MAX_SESSION:
            points = tuple(
                points[i] + points[i + 1] if i + 1 < len(points) else points[i]
                for i in range(0, len(points), 2)
            )
            self._per_point *= 2
        self._num_in_last_point = 1
        self._session = (*points, interval)
