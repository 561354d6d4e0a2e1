"""What `mira-chat doctor` hears of the engine: the machine, the installation, the model.

Measures the link with the engine's own readers, looks at everything else, loads no weight
and changes nothing: what cannot be found out is a fact, too. Runs in the engine process,
because torch and the native kernels are asked there. Each group of facts is one function.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from mira_kernels import cpu, native

from .checkpoint.store import ExpertStore
from .config import EngineConfig, format_bytes
from .errors import MiraError
from .events import DescribeMachine, MachineFact, Notice
from .library import ModelHome, ModelLibrary
from .load_plan import make_load_plan
from .policy.budget import SLOW_LINK_BYTES_PER_S
from .predictor.bank import MANIFEST_FILE, PredictorBank
from .runtime.card_facts import accelerator_facts
from .runtime.cards import find_cards, look_at_limits, look_at_torch
from .runtime.disk import has_direct_reads, open_for_records
from .runtime.gpu_device import settle_dtype
from .runtime.host_system import drive_facts, look_at_host, system_facts
from .runtime.probe import default_num_threads, machine_name, measure_rates
from .runtime.telemetry import MemoryProbe
from .system_memory import system_memory
from .types import FactMark, Precision

_LIBRARIES = ("torch", "transformers", "safetensors", "huggingface-hub", "numpy")
_CPU_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "i8mm",
)  # fmt: skip
"""What kernels for INT4 and bfloat16 are written for."""

_LITTLE_DISK_BYTES = 4 * 2**30
_FULL_DISK_BYTES = 2**30
_LITTLE_MEMORY_BYTES = 2**30

_NOTICE_HINT = "Nothing needs doing; mira-chat plan shows what other choices would give."


def describe_machine(
    library: ModelLibrary, request: DescribeMachine, *, cache_dir: Path | None
) -> tuple[MachineFact, ...]:
    """Gathers the facts; takes about a second, most of it to measure the link.

    Args:
        library: Where models are; the link and the disk are those of its folder.
        request: The model and what it would be loaded with.
        cache_dir: Where native kernels and compiled steps are kept, `None` for nowhere.
    """
    num_threads = request.config.num_threads or default_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return (
            *_software(),
            *_device(num_threads, is_card_used=request.config.gpu is not None),
            *_memory(),
            *_kernels(cache_dir),
            *_disk(library.data_dir),
            *_link(library.data_dir, request.config, num_threads),
            *_model(library, request, cache_dir),
        )
    finally:
        torch.set_num_threads(before)


def _software() -> Iterator[MachineFact]:
    for name in _LIBRARIES:
        try:
            yield MachineFact(code=name, text=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield MachineFact(
                code=name,
                text="not installed",
                mark=FactMark.PROBLEM,
                hint="Install mira-chat again.",
            )


def _device(num_threads: int, *, is_card_used: bool) -> Iterator[MachineFact]:
    yield MachineFact(code="device", text=machine_name())
    yield from accelerator_facts(
        find_cards(),
        look_at_torch(),
        look_at_limits(),
        is_used=is_card_used,
        host=look_at_host(),
    )
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    few = usable is not None and usable < 2
    yield MachineFact(
        code="cores",
        text=f"{physical} physical, {usable} usable, {num_threads} for the arithmetic",
        mark=FactMark.NOTE if few else FactMark.OK,
        hint="With one core, the app and the engine take turns." if few else "",
        value=float(physical),
    )
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ", ".join(flag for flag in _CPU_FLAGS if flag in _cpu_flags()) or "none named"
    has_packed = cpu.native_int4_layout() is not None
    yield MachineFact(
        code="cpu-features",
        text=f"torch uses {capability}; the processor has {flags}",
        mark=FactMark.OK if has_packed else FactMark.NOTE,
        hint="" if has_packed else "INT4 experts are unpacked for every use here, which is slower.",
    )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(found.partition(":")[2].split())


def _memory() -> Iterator[MachineFact]:
    memory = system_memory()
    is_little = memory.available_bytes < _LITTLE_MEMORY_BYTES
    yield MachineFact(
        code="memory",
        text=f"{format_bytes(memory.available_bytes)} free of {format_bytes(memory.total_bytes)}",
        mark=FactMark.PROBLEM if is_little else FactMark.OK,
        hint="Close other programs, or give a smaller --budget." if is_little else "",
        value=float(memory.available_bytes),
    )
    is_contained = memory.container_bytes is not None
    yield from system_facts(look_at_host(), None if is_contained else memory.total_bytes)
    if not MemoryProbe().is_exact:
        yield MachineFact(
            code="memory-peak",
            text="sampled: this system keeps no peak that can be reset",
            mark=FactMark.NOTE,
            hint="A short peak can be missed in the figures; nothing else changes.",
        )


def _kernels(cache_dir: Path | None) -> Iterator[MachineFact]:
    compiler = native.compiler()
    if cache_dir is not None and native.is_built(cache_dir):
        yield MachineFact(code="native-kernels", text="built for this processor")
    elif compiler is not None and cache_dir is not None:
        yield MachineFact(
            code="native-kernels",
            text=f"not built yet; {compiler} will build them",
            mark=FactMark.NOTE,
            hint="The first chat builds them beside it; `run --compile wait` waits for it.",
        )
    else:
        why, remedy = native.compiler_problem()
        yield MachineFact(
            code="native-kernels",
            text=f"off, several times slower: {why}",
            mark=FactMark.PROBLEM if native.is_supported() else FactMark.NOTE,
            hint=remedy,
        )
    if cache_dir is None:
        return
    num_steps = sum(1 for _ in (cache_dir / "steps").glob("*.bin"))
    if not num_steps and not native.is_supported():
        return
    yield MachineFact(
        code="compiled-steps",
        text=f"{num_steps} kept in {cache_dir}",
        mark=FactMark.OK if num_steps else FactMark.NOTE,
        hint="" if num_steps else "They are compiled beside the first chat, in a minute or so.",
        value=float(num_steps),
    )


def _disk(folder: Path) -> Iterator[MachineFact]:
    """Free bytes, whether the folder can be written, and whether reads can be direct."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        probe.write_bytes(b"\0" * 4096)
        fd, is_direct = open_for_records(probe, is_direct=True)
        os.close(fd)
    except OSError as error:
        yield MachineFact(
            code="disk",
            text=f"{folder} cannot be written: {error.strerror}",
            mark=FactMark.PROBLEM,
            hint="Set MIRA_CHAT_DATA_DIR to a folder that can be written.",
        )
        return
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    mark = FactMark.OK
    if free < _LITTLE_DISK_BYTES:
        mark = FactMark.PROBLEM if free < _FULL_DISK_BYTES else FactMark.NOTE
    yield MachineFact(
        code="disk",
        text=f"{format_bytes(free)} free for models in {folder}",
        mark=mark,
        hint="" if mark is FactMark.OK else "Free some space, or remove a model: mira-chat rm.",
        value=float(free),
    )
    yield from drive_facts(folder, look_at_host())
    yield MachineFact(
        code="direct-io",
        text="reads pass the system's cache by"
        if is_direct
        else f"{'refused by this file system' if has_direct_reads() else 'not to be had here'}; "
        "records are read through the system's cache, which works",
        mark=FactMark.OK if is_direct or not has_direct_reads() else FactMark.NOTE,
        hint="" if is_direct else "Another disk may do better.",
    )


def _link(folder: Path, config: EngineConfig, num_threads: int) -> Iterator[MachineFact]:
    try:
        rates = measure_rates(
            folder,
            num_threads=num_threads,
            num_reader_threads=config.num_reader_threads,
            device_memory_bytes=system_memory().available_bytes,
        )
    except (OSError, MiraError) as error:
        yield MachineFact(
            code="link",
            text=f"could not be measured: {error}",
            mark=FactMark.PROBLEM,
            hint="The disk of the models has to be writable, with 64 MiB free.",
        )
        return
    is_slow = rates.link_bytes_per_s < SLOW_LINK_BYTES_PER_S
    yield MachineFact(
        code="link",
        text=f"{format_bytes(rates.link_bytes_per_s)}/s and "
        f"{1e3 * rates.link_latency_s:.2f} ms a record, with {config.num_reader_threads} readers",
        mark=FactMark.NOTE if is_slow else FactMark.OK,
        hint="A faster disk, or a larger --budget, spares waiting." if is_slow else "",
        value=rates.link_bytes_per_s,
    )
    yield MachineFact(
        code="memory-rate",
        text=f"{format_bytes(rates.device_bytes_per_s)}/s read",
        value=rates.device_bytes_per_s,
    )
    yield MachineFact(
        code="arithmetic",
        text=f"{rates.flops_per_s / 1e9:.0f} billion bfloat16 operations a second",
        value=rates.flops_per_s,
    )
    if config.link.is_emulated:
        yield MachineFact(
            code="emulated-link",
            text="the link is held back, as asked for",
            mark=FactMark.NOTE,
            hint="Leave --link-rate and --link-latency out.",
        )


def _model(
    library: ModelLibrary, request: DescribeMachine, cache_dir: Path | None
) -> Iterator[MachineFact]:
    """How the chosen model stands: prepared, its memory plan, predictors, profile of K."""
    config, code = request.config, "model"
    try:
        home = library.resolve(request.model)
        if not home.is_ready(config.precision):
            yield MachineFact(
                code="model",
                text=f"{home.title} is not prepared in {config.precision}",
                mark=FactMark.NOTE,
                hint=f"Run: mira-chat prepare {home.name}",
            )
            return
        target = ExpertStore.open(home.store_dir(config.precision))
        has_plane = target.format.draft_plane is not None
        draft = target if has_plane else ExpertStore.open(home.store_dir(Precision.INT4))
        yield MachineFact(code="model", text=f"{home.title} is ready in {config.precision}")
        code = "plan"
        yield _predictors(home, target.manifest.revision)
        yield from _plan(home, config, target, draft, cache_dir)
    except MiraError as error:
        hint = error.hint or "Prepare the model again, or pick another."
        yield MachineFact(code=code, text=error.message, mark=FactMark.PROBLEM, hint=hint)


def _predictors(home: ModelHome, revision: str) -> MachineFact:
    again = f"Run: mira-chat prepare {home.name}"
    if not (home.predictors_dir / MANIFEST_FILE).exists():
        return MachineFact(code="predictors", text="none", mark=FactMark.NOTE, hint=again)
    bank = PredictorBank.load(home.predictors_dir, revision)
    if bank is None:
        return MachineFact(
            code="predictors",
            text="there, but damaged or of other weights; not used",
            mark=FactMark.PROBLEM,
            hint=again,
        )
    num_layers = len(bank.choices)
    return MachineFact(
        code="predictors",
        text=f"for {num_layers} of {bank.facts.num_layers} layers",
        value=float(num_layers),
    )


def _plan(
    home: ModelHome,
    config: EngineConfig,
    target: ExpertStore,
    draft: ExpertStore,
    cache_dir: Path | None,
) -> Iterator[MachineFact]:
    notices: list[Notice] = []
    plan = make_load_plan(
        home, settle_dtype(config), target, draft, profile_dir=cache_dir, on_notice=notices.append
    )
    memory, profile = plan.memory, plan.profile
    yield MachineFact(
        code="plan",
        text=f"{format_bytes(memory.total_bytes)} in all, {memory.num_slots} of "
        f"{memory.num_experts} experts in slots, mode {memory.mode}",
        value=float(memory.total_bytes),
    )
    if profile is not None:
        yield MachineFact(
            code="profile", text=f"K = {profile.best} was fastest here", value=float(profile.best)
        )
    elif config.num_draft_tokens is None:
        yield MachineFact(
            code="profile",
            text="none for this model, machine and budget; K is chosen as replies go",
            mark=FactMark.NOTE,
            hint="mira-chat profile --quick measures it.",
        )
    for notice in notices:
        yield MachineFact(code=notice.code, text=notice.text, mark=FactMark.NOTE, hint=_NOTICE_HINT)
