"""What does the app take from the engine, and how soon can one write?

Method: the built-in model answers one prompt with a fixed K and budget, in turn in the
app (headless at 120x40 in this process, panels on, the engine a process of its own) and in
`mira-chat run --plain`; medians of the engine's own tokens/s, and their ratio. CPU seconds
are this process's own while the reply is written. For the cold start the program is opened
in a pseudo-terminal, in a home where it was used before, until a typed letter is on the
screen. Neither process may have loaded torch. Left out: drawing by a real terminal, and
time to the first token.

Needs a data folder with the prepared model; it is only read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from app_homes import make_home
from app_scenes import until
from e2e.terminal import Terminal
from mira_app import wiring
from mira_app.controller import ChatController, Stage
from mira_app.tui.app import MiraApp
from mira_engine.api import ReplyStats

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
PROMPT = "Write a long story about a lighthouse."
SIZE = (120, 40)
SHARE_BAR = 0.85
START_BAR_S = 1.0
_RATE = re.compile(r"([\d.]+) tok/s")


async def reply_in_app() -> tuple[ReplyStats, float]:
    """Returns the figures of a reply in the app, and CPU seconds per 1,000 tokens here."""
    client = wiring.make_client()
    controller = ChatController(
        client, wiring.make_catalog(), wiring.read_settings({"model": "builtin"})
    )
    app = MiraApp(controller)
    try:
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: controller.can_send and app.screen is app.chat_screen)
            app.chat_screen.composer.insert(PROMPT)
            await pilot.press("enter")
            await until(pilot, lambda: bool(controller.partial))
            began, had = time.process_time(), controller.stats.num_new_tokens
            while controller.stage is Stage.REPLYING:
                await asyncio.sleep(0.2)
            cpu_s = time.process_time() - began
    finally:
        client.close()
    stats = controller.stats
    return stats, 1e3 * cpu_s / max(1, stats.num_new_tokens - had)


def reply_of_run() -> float:
    """Returns the tokens/s of the same reply in `mira-chat run --plain`."""
    done = subprocess.run(
        [*PROGRAM, "run", "--plain", PROMPT], capture_output=True, text=True, check=True
    )
    found = _RATE.search(done.stderr.splitlines()[-1])
    assert found is not None, done.stderr
    return float(found[1])


def cold_start_s() -> float:
    """Returns seconds from the start of the program until a typed letter is on the screen."""
    began = time.perf_counter()
    with Terminal(PROGRAM, columns=SIZE[0], lines=SIZE[1]) as terminal:
        terminal.wait_for("Ask something.")
        terminal.type("Q")
        terminal.wait_until(
            lambda screen: "Ask something." not in screen and "Q" in terminal.cursor_line,
            what="the letter",
        )
        seconds = time.perf_counter() - began
        maps = psutil.Process(terminal.pid).memory_maps()
        assert not [part.path for part in maps if "torch" in part.path]
        # The letter would come back as the chat's draft at the next start.
        terminal.press("backspace")
        terminal.wait_for("Ask something.")
        terminal.press("ctrl+q")
        terminal.wait_exit()
    return seconds


def measure(num_rounds: int) -> dict[str, float]:
    """Alternates both ways and returns medians."""
    in_app: list[float] = []
    in_run: list[float] = []
    cpu_s: list[float] = []
    for number in range(num_rounds):
        stats, cpu_s_per_1000 = asyncio.run(reply_in_app())
        in_app.append(stats.tokens_per_s)
        cpu_s.append(cpu_s_per_1000)
        in_run.append(reply_of_run())
        print(
            f"round {number}: app {in_app[-1]:.2f} tok/s, run --plain {in_run[-1]:.2f};"
            f" the app's CPU {cpu_s[-1]:.2f} s per 1,000 tokens",
            flush=True,
        )
    assert "torch" not in sys.modules
    starts = [cold_start_s() for _ in range(num_rounds)]
    return {
        "app_tok_per_s": statistics.median(in_app),
        "run_tok_per_s": statistics.median(in_run),
        "app_share": statistics.median(in_app) / statistics.median(in_run),
        "app_share_bar": SHARE_BAR,
        "app_cpu_s_per_1000_tokens": statistics.median(cpu_s),
        "cold_start_s": statistics.median(starts),
        "cold_start_bar_s": START_BAR_S,
    }


def main() -> None:
    """Prints a line a round and, last, one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir", type=Path, help="a data folder with the built-in model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a reply")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        make_home(args.data_dir, Path(home), is_known=True)
        (Path(home) / "config.toml").touch()
        os.environ |= {
            "MIRA_CHAT_DATA_DIR": home,
            "MIRA_CHAT_CONFIG": str(Path(home) / "config.toml"),
            "MIRA_CHAT_K": "0",
            "MIRA_CHAT_BUDGET": "60%",
            "MIRA_CHAT_MAX_TOKENS": str(args.tokens),
        }
        print(json.dumps(measure(args.rounds)))


if __name__ == "__main__":
    main()
