"""A small driver of the expert cache, and whole layers, passes and prompts run on it.

Records land at once, in the order in which they were asked for.
"""

from __future__ import annotations

from mira_engine.policy.base import Compute, Fetch
from mira_engine.policy.cache_setup import CacheSetup
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.types import Eviction

SETUP = CacheSetup(
    num_layers=4,
    num_experts=8,
    top_k=2,
    num_slots=6,
    eviction=Eviction.LRU,
    record_bytes=100,
    num_reserved_slots=1,
)


def fetched(actions) -> list[tuple[int, int]]:
    return [tuple(a.expert) for a in actions if isinstance(a, Fetch)]


def bring(driver: ExpertCacheDriver, layer: int, *experts: int) -> None:
    """Has experts routed to, loaded and computed."""
    for action in driver.enter_layer(layer, [(e, 1) for e in sorted(experts)]):
        if isinstance(action, Fetch):
            driver.landed(action.slot)
    if driver.open_layer.pinned:
        driver.computed([driver.residency.slot_of(e) for e in sorted(driver.open_layer.pinned)])
    driver.leave_layer()


def run_pass(driver: ExpertCacheDriver, *experts: int) -> int:
    """A pass in which every layer needs these experts. Returns what had to be fetched."""
    num_fetched = 0
    for layer in range(SETUP.num_layers):
        waiting = driver.enter_layer(layer, [(e, 1) for e in experts])
        while waiting:
            slots = [a.slot for a in waiting if isinstance(a, Fetch)]
            num_fetched += len(slots)
            waiting = [a for slot in slots for a in driver.landed(slot)]
            driver.computed([driver.residency.slot_of(e) for e in sorted(driver.open_layer.pinned)])
        driver.leave_layer()
    driver.end_pass(1)
    return num_fetched


def read_prompt(driver: ExpertCacheDriver, num_passes: int) -> int:
    """Runs passes that need every expert of every layer. Returns how many were fetched."""
    num_fetched = 0

    def carry_out(actions):
        nonlocal num_fetched
        fetches = [a for a in actions if isinstance(a, Fetch)]
        num_fetched += len(fetches)
        return [a.slot for a in fetches], [a for a in actions if isinstance(a, Compute)]

    for number in range(num_passes):
        driver.begin_prefill(num_passes - number)
        for layer in range(SETUP.num_layers):
            loading, ready = carry_out(driver.enter_layer(layer, [(e, 30) for e in range(8)]))
            while driver.is_layer_open or loading:
                if loading:
                    more, found = carry_out(driver.landed(loading.pop(0)))
                    loading, ready = loading + more, ready + found
                if ready and driver.residency.is_pinned(ready[0].slot):
                    loading += carry_out(driver.computed([ready.pop(0).slot]))[0]
                elif ready:
                    ready.pop(0)
            while ready:
                one = ready.pop(0)
                if driver.residency.is_pinned(one.slot):
                    loading += carry_out(driver.computed([one.slot]))[0]
            driver.leave_layer()
    driver.end_prefill()
    return num_fetched
