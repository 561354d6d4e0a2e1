"""What do predictor heads gain in plain decoding, and what does prefetching gain for prompts?

Question: milliseconds a token of plain decoding (K = 0) on demand and with the heads, over
five budgets, and seconds to the first token of a 1000-token prompt and of a third turn with
and without prefetching, with the bytes moved. Mira's Table III and Figure on TTFT, in our
terms.

Method: the built-in model, one process, the engines of a budget take turns on the same
prompts, greedy, medians over rounds, the first round warms up. The link is held to
`--link-ratio` times the decoding of a token (10: about Phi-3.5-MoE over PCIe 4); "emulated".
Heads' own time is in their milliseconds.

Left out: drafting, detokenising, the process boundary.

Run: python tests/bench/prediction.py [--budgets 30,45,60,75,90] [--rounds 5] [--tokens 64]
Predictors must have been made (`mira-chat prepare builtin`). The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from decode import PROMPTS, Row, _prompt_tokens, expert_bytes_of_token, run_engine
from mira_app.paths import cache_dir, data_dir
from mira_assets.calibration import calibration_prompts
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import CompileMode, Precision

WAYS = {"on demand": False, "heads": True}


def load(
    home: ModelHome, arguments: argparse.Namespace, share: float, rate: float | None, is_ahead: bool
) -> Engine:
    config = EngineConfig(
        budget=MemoryAmount(share=share),
        num_draft_tokens=0,
        is_prefetch_enabled=is_ahead,
        link=LinkConfig(bytes_per_s=rate),
        num_threads=arguments.threads,
        compile_mode=CompileMode.WAIT,
    )
    engine = Engine.load(home, config, cache_dir=arguments.cache_dir or cache_dir())
    engine._end_ids = frozenset()
    return engine


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, float, int]:
    """Returns seconds to the first token, megabytes moved for it, and tokens reused."""
    for _ in engine.reply(prompt, SamplingConfig(max_new_tokens=8)):
        pass
    stats = engine.stats()
    return stats.ttft_s, stats.prefill_bytes_moved / 1e6, stats.num_cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budgets", default="30,45,60,75,90")
    parser.add_argument("--link-ratio", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--cache-dir", type=Path, default=None)
    arguments = parser.parse_args()
    home = ModelLibrary(arguments.data_dir or data_dir()).resolve("builtin")
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    resident, row = load(home, arguments, 4.0, None, False), Row("resident")
    for _ in range(3):
        run_engine(resident, row, _prompt_tokens(resident, PROMPTS[0]), arguments.tokens)
    resident.close()
    token_bytes = expert_bytes_of_token(home, Precision.NESTED)
    rate = token_bytes / (1e-3 * row.median_ms * arguments.link_ratio)
    print(f"all resident {row.median_ms:.1f} ms; link emulated at {rate / 1e6:.0f} MB/s")
    text = " ".join(prompt.text for prompt in calibration_prompts())
    names = ("TPOT", "stall", "MB/token", "hits", "TTFT 1000", "MB", "TTFT turn 3", "MB")
    print(("{:<8}{:<11}" + "{:>12}" * 8).format("budget", "", *names))
    result: dict[str, dict[str, object]] = {}
    for budget in arguments.budgets.split(","):
        engines = {
            way: load(home, arguments, int(budget) / 100, rate, is_ahead)
            for way, is_ahead in WAYS.items()
        }
        if engines["heads"].executor.predictor is None:
            parser.error("no predictors were made: run `mira-chat prepare builtin`")
        rows = {way: Row(way) for way in engines}
        long: dict[str, list] = {way: [] for way in engines}
        third: dict[str, list] = {way: [] for way in engines}
        for number in range(-1, arguments.rounds):
            if number == 0:
                rows = {way: Row(way) for way in engines}
                long = {way: [] for way in engines}
                third = {way: [] for way in engines}
            for way, engine in engines.items():
                short = _prompt_tokens(engine, PROMPTS[number % len(PROMPTS)])
                run_engine(engine, rows[way], short, arguments.tokens)
                engine.state.reset()
                whole = _prompt_tokens(engine, (text + " ") * 4)[:1000]
                long[way].append(first_token(engine, whole))
                # Two turns more, each behind what is cached.
                second = engine.state.tokens + short
                first_token(engine, second)
                third[way].append(first_token(engine, engine.state.tokens + short))
        for way, engine in engines.items():
            replies = rows[way]
            stats = replies.stats
            tokens = sum(s.num_new_tokens - 1 for s in stats)
            hits, misses = sum(s.num_hits for s in stats), sum(s.num_misses for s in stats)
            middle = [statistics.median(values) for values in zip(*long[way], strict=True)]
            last = [statistics.median(values) for values in zip(*third[way], strict=True)]
            figures = {
                "tpot_ms": round(replies.median_ms, 2),
                "stall_ms": round(replies.per_token_ms(lambda s: s.stall_s) or 0.0, 2),
                "mb_per_token": round(sum(s.bytes_moved for s in stats) / tokens / 1e6, 2),
                "hit_rate": round(hits / (hits + misses), 3),
                "ttft_1000_s": round(middle[0], 2),
                "mb_1000": round(middle[1]),
                "ttft_turn3_s": round(last[0], 2),
                "mb_turn3": round(last[1]),
            }
            print(("{:<8}{:<11}" + "{:>12}" * 8).format(f"{budget}%", way, *figures.values()))
            result.setdefault(f"{budget}%", {})[way] = figures
            engine.close()
    print(
        json.dumps(
            {
                "bench": "prediction",
                "threads": arguments.threads,
                "rounds": arguments.rounds,
                "link_ratio": arguments.link_ratio,
                "link_mb_per_s": round(rate / 1e6),
                "resident_ms": round(row.median_ms, 2),
                "budgets": result,
            }
        )
    )


if __name__ == "__main__":
    main()
