"""What do the live panels cost the app's process?

The panels' own app without a terminal, fed with a made-up reply: the same samples with the
panels closed, with the column and the map open, and with the details screen. CPU seconds of
the process for each sample, less those of the closed panels, times the rate at which
samples come. Rounds of the three alternate; the median counts. Left out: the terminal
itself, which draws what it is sent, and the engine's share.

    python tests/bench/panels.py --layers 48 --experts 128
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from panel_scenes import Feed, PanelApp

SAMPLES_PER_S = 4
"""How often a reply's figures come."""

ARMS = ("closed", "open", "details")


async def cpu_per_sample(arm: str, arguments: argparse.Namespace) -> tuple[float, int]:
    """Returns CPU seconds of a sample, and how many widgets there were."""
    app = PanelApp()
    feed = Feed(num_layers=arguments.layers, num_experts=arguments.experts)
    states = [feed.next() for _ in range(arguments.samples + 8)]
    async with app.run_test(size=(arguments.columns, arguments.rows)) as pilot:
        if arm == "details":
            await pilot.press("f4")
        else:
            app.screen.side.is_open = arm == "open"
        for state in states[:8]:
            app.show(state)
            await pilot.pause(1 / SAMPLES_PER_S)
        started = time.process_time()
        for state in states[8:]:
            app.show(state)
            await asyncio.sleep(1 / SAMPLES_PER_S)
        elapsed = time.process_time() - started
        return elapsed / arguments.samples, len(app.screen.walk_children())


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--rows", type=int, default=60)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    widgets = {}
    for _ in range(arguments.rounds):
        for arm in ARMS:
            spent, widgets[arm] = asyncio.run(cpu_per_sample(arm, arguments))
            seconds[arm].append(spent)
    medians = {arm: statistics.median(spent) for arm, spent in seconds.items()}
    report: dict[str, object] = {"samples_per_s": SAMPLES_PER_S, "widgets": widgets}
    for arm in ARMS:
        share = SAMPLES_PER_S * (medians[arm] - medians["closed"])
        print(f"{arm:8s} {1e3 * medians[arm]:6.2f} ms a sample, {share:6.2%} of a core more")
        report[arm] = {"ms_per_sample": 1e3 * medians[arm], "core_share": share}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
