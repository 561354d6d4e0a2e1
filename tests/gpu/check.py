"""Proves the GPU path on the card at hand, and measures it: one command, at most 5 minutes.

Without a card it goes as far as that goes: kernels in triton's interpreter, copies on lanes
that check their order, one small shape, no times. Nothing is fetched; weights are random and
made here.

Sections, each with a limit; what a limit cut off is named:
- kernels: every format against float64, and a token alone against it among others;
- kernel times (card): against the time that copying their bytes takes, Mixtral's expert at one
  token and the small ones of Qwen3-30B-A3B together;
- link (card): the pinned link's rate alone, and while kernels run;
- captured draft (card): a captured draft step against its kernels' own time;
- truths: card = processor, any budget = all slots, drafting = plain, captured = launched, on
  tiny models through the whole engine;
- decoding: one real shape with attention under two enforced budgets, the link as it is and
  held to PCIe 4; on demand with LRU against HOT and STAGE, lookahead and draft, with the share
  of the gap that is closed; a timeline of a round in the lanes. Routing is replayed and
  acceptance set, and said so;
- transformers with accelerate: the same shape in the same memory, added up from few layers.

Run: python tests/gpu/check.py [--shape qwen3|deepseek|qwen1.5] [--tokens N] [--json FILE]
Prints tables and what met its target; the last line is one JSON document, which FILE gets after
every section. Ends with 1 if a section failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import sys
import time
from functools import partial
from pathlib import Path

STARTED = time.monotonic()
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.captured import describe_captured, time_captured_draft
from gpu.card import HAS_CARD, card_name
from gpu.decoding import decode, describe_decoding
from gpu.kernel_checks import check_kernels, describe_errors, describe_times, time_kernels
from gpu.link_rates import describe_link, time_link
from gpu.offloaded import describe_offloaded, time_offloaded
from gpu.sections import Sections
from gpu.shapes import SHAPES, SMALL
from gpu.targets import targets
from gpu.truths import check_truths, describe_truths

TOTAL_S = 285.0
"""For everything, from the start of the process; a section's last case may go past it."""

HANG_S = 298.0
"""After which a section that hangs is broken off, and what the file has is all there is."""

PACE = 1 if HAS_CARD else 10
"""What limits are multiplied by: the interpreter takes as long as the processor lets it."""


def run_sections(sections: Sections, shape_name: str, num_tokens: int) -> None:
    """Runs every section of the check."""
    shape = SHAPES[shape_name] if HAS_CARD else SMALL
    sections.document["shape"] = shape.name
    run = sections.run
    run("kernels", 35 * PACE, check_kernels, describe=describe_errors)
    run("kernel times", 25 * PACE, time_kernels, describe=describe_times, needs_card=True)
    link = run("link", 15 * PACE, time_link, describe=describe_link, needs_card=True)
    run(
        "captured draft",
        10 * PACE,
        time_captured_draft,
        describe=describe_captured,
        needs_card=True,
    )
    run("truths", 45 * PACE, check_truths, describe=describe_truths)
    own_rate = link.get("alone_gb_per_s")
    work = partial(
        decode,
        shape=shape,
        num_tokens=num_tokens,
        link_bytes_per_s=1e9 * own_rate if own_rate else None,
    )
    run("decoding", 110 * PACE, work, describe=describe_decoding)
    work = partial(time_offloaded, shape=shape)
    run("transformers with accelerate", 40 * PACE, work, describe=describe_offloaded)


def main() -> None:
    """Runs everything and prints tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3")
    parser.add_argument("--tokens", type=int, default=24 if HAS_CARD else 2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import triton

    loading_s = time.monotonic() - STARTED
    faulthandler.dump_traceback_later(PACE * HANG_S - loading_s, exit=True)
    sections = Sections(total_s=PACE * TOTAL_S - loading_s, has_card=HAS_CARD, path=args.json)
    document = sections.document
    document |= {
        "card": card_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    print(f"card: {card_name() or 'none; kernels run in the interpreter, nothing is timed'}")
    run_sections(sections, args.shape, args.tokens)
    faulthandler.cancel_dump_traceback_later()
    found = list(targets(document["results"]))
    document |= {
        "targets": [target.as_dict() for target in found],
        "seconds": round(time.monotonic() - STARTED, 1),
    }
    sections.write()
    print("\ntargets")
    for target in found:
        print(target)
    cut = [name for name, about in document["sections"].items() if about["state"] == "cut"]
    print(f"\n{document['seconds']} s; cut short: {', '.join(cut) or 'nothing'}")
    print(json.dumps(document))
    sys.exit(1 if sections.has_failed else 0)


if __name__ == "__main__":
    main()
