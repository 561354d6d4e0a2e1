"""A scripted engine process for the app's tests: speaks the protocol, computes nothing.

Run as `python fake_engine.py [MODE ...]`; a mode changes one behaviour:

    slow            tokens keep coming until cancelled
    die-mid-reply   SIGKILLs itself after three tokens, at the first reply of each process
    die-once=PATH   the same, but only while PATH exists, which it removes first
    die-at-start    writes to standard error and exits with code 7 before it is ready
    wrong-version   introduces itself with another protocol version
    hang            says that it is ready, then nothing more
    mute-start      says nothing at all
    garbage         sends a line that is no message after the first request
    unread          answers every request with a failure that names no request
    plan-refused    PlanModel finds nothing that fits
    fail-load       LoadModel ends with a BudgetError
    fail-reply      Generate ends with a ContextLengthError after two tokens
    slow-prepare    preparation goes on until cancelled
    die-mid-prepare=PATH  ten layers, each noted in PATH once it is done; SIGKILLs itself
                    after the fifth, and goes on from there the next time
    stubborn        ends by SIGKILL alone, or ten minutes after its start
    escapes         the reply carries terminal control sequences, split over deltas
    empty           the reply has no text
    thinking        the reply has thinking before it, with an escape sequence
    echo            the reply is the chat that was sent, a line for each message
    no-link         DescribeMachine finds a problem
    full-prepare    preparation reports a download, a check, a conversion and predictors
    fail-prepare=E  PrepareModel ends with the error of that name
    fail-profile    ProfileModel ends with a BudgetError
    fail-evaluate   EvaluateModel ends with a StoreError
    slow-evaluate   an evaluation goes on until cancelled
    trimmed         the chat does not fit: four messages are left out
    residency       a sample of where the experts are comes with every token
    marker=PATH     creates PATH when preparation is done
"""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import sys
import threading
import time

from evaluation_fakes import EVALUATION
from mira_engine import api

STATS = api.ReplyStats(
    num_prompt_tokens=20,
    num_new_tokens=5,
    ttft_s=0.25,
    decode_s=0.5,
    num_hits=90,
    num_misses=10,
    num_records_loaded=10,
    bytes_moved=10 * 2**20,
    stall_s=0.01,
    num_drafted=8,
    num_accepted=6,
    num_rounds=2,
    expert_peak_bytes=300 * 2**20,
    peak_memory_bytes=800 * 2**20,
    planned_memory_bytes=900 * 2**20,
)
PLAN = api.MemoryPlan(
    non_expert_bytes=400 * 2**20,
    kv_bytes=90 * 2**20,
    workspace_bytes=50 * 2**20,
    budget_bytes=360 * 2**20,
    draft_bytes=200 * 2**20,
    slot_bytes=448 * 1024,
    num_slots=240,
    reference_bytes=480 * 2**20,
    num_experts=480,
    num_draft_tokens=4,
)
MACHINE = api.MachineRates(
    name="fake machine",
    device_memory_bytes=8 * 2**30,
    device_bytes_per_s=2e10,
    link_bytes_per_s=1e9,
)
ALTERNATIVES = (
    api.PlanAlternative(
        strategy=api.Strategy.SPECULATIVE,
        precision=api.Precision.NESTED,
        num_draft_tokens=4,
        plan=PLAN,
        hit_rate=0.9,
        tpot_s=0.0123,
        ttft_s=0.5,
        is_chosen=True,
        reason="the fastest that fits and is allowed",
    ),
    api.PlanAlternative(
        strategy=api.Strategy.ON_DEMAND,
        precision=api.Precision.NESTED,
        num_draft_tokens=0,
        missing_bytes=5 * 2**20,
        reason="5.0 MiB short: it needs 1.0 GiB in all",
    ),
)
FACTS = (
    api.MachineFact(code="torch", text="2.99"),
    api.MachineFact(
        code="native-kernels",
        text="not built yet",
        mark=api.FactMark.NOTE,
        hint="The first chat builds them.",
    ),
    api.MachineFact(code="link", text="1.0 GiB/s", value=float(2**30)),
)
THOUGHTS = ("The person ", "wants it ", "\x1b[31mshort.")
WORDS = ("A cache ", "keeps ", "**hot** ", "things ", "near.")
FULL_STEPS = (
    {"step": "download", "done": 2**30, "total": 4 * 2**30, "unit": "bytes", "detail": "1 of 2"},
    {"step": "check", "done": 4 * 2**30, "total": 4 * 2**30, "unit": "bytes"},
    {"step": "convert", "done": 2**20, "total": 2**30, "unit": "bytes", "detail": "int8, layer 1"},
    {"step": "convert", "done": 2**20, "total": 2**29, "unit": "bytes", "detail": "int4, layer 1"},
    {"step": "predictors", "done": 3, "total": 22, "unit": "layers"},
)
ESCAPES = ("safe \x1b", "[31mred\x1b[", "0m \x1b]0;title", "\x07done\u202e\r\n", "\tend")


class FakeEngine:
    """Answers requests in order; cancels from the reader thread."""

    def __init__(self, modes: list[str]) -> None:
        self.modes = {m.split("=", 1)[0]: m.split("=", 1)[-1] for m in modes}
        self.cancelled: set[str] = set()
        self.requests: queue.Queue = queue.Queue()
        self.writing = threading.Lock()
        self.started = time.monotonic()

    def emit(self, event: api.Event) -> None:
        with self.writing:
            sys.stdout.write(api.encode(event) + "\n")
            sys.stdout.flush()

    def read(self) -> None:
        for line in sys.stdin:
            request = api.decode(line)
            if isinstance(request, api.Cancel):
                self.cancelled.add(request.request_id)
            else:
                self.requests.put(request)
        if "stubborn" in self.modes:
            return
        self.requests.put(None)
        # Nothing of a fake is worth an orderly end once the app is gone.
        threading.Timer(0.5, os._exit, (0,)).start()

    def beat(self) -> None:
        while True:
            time.sleep(0.1)  # the pace of heartbeats, as the real engine has one
            self.emit(api.Heartbeat(uptime_s=time.monotonic() - self.started))

    def run(self) -> int:
        print("fake engine starts", file=sys.stderr, flush=True)
        if "die-at-start" in self.modes:
            print("boom: no such library", file=sys.stderr, flush=True)
            return 7
        if "mute-start" in self.modes:
            threading.Event().wait()
        version = 999 if "wrong-version" in self.modes else api.PROTOCOL_VERSION
        self.emit(api.EngineReady(protocol_version=version, pid=os.getpid()))
        if "hang" in self.modes:
            threading.Event().wait()
        if "stubborn" in self.modes:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Timer(600.0, os._exit, (1,)).start()
        threading.Thread(target=self.beat, daemon=True).start()
        threading.Thread(target=self.read, daemon=True).start()
        while (request := self.requests.get()) is not None:
            if isinstance(request, api.Shutdown):
                if "stubborn" in self.modes:
                    continue
                return 0
            if "unread" in self.modes:
                self.emit(api.RequestFailed(request_id="", code="MiraError", message="Unread."))
                continue
            if "garbage" in self.modes:
                print("this is no message", flush=True)
                continue
            {
                api.PrepareModel: self.prepare,
                api.LoadModel: self.load,
                api.Reconfigure: self.reconfigure,
                api.Generate: self.generate,
                api.PlanModel: self.plan,
                api.DescribeMachine: self.describe,
                api.ProfileModel: self.profile,
                api.EvaluateModel: self.evaluate,
            }[type(request)](request)
        return 0

    def prepare(self, request: api.PrepareModel) -> None:
        if "die-mid-prepare" in self.modes:
            self.prepare_layers(request, self.modes["die-mid-prepare"])
            return
        done = 0
        while done < 10 or "slow-prepare" in self.modes:
            if request.request_id in self.cancelled:
                self.fail(request, api.CancelledError("Preparation was stopped."))
                return
            if "fail-prepare" in self.modes:
                error = getattr(api, self.modes["fail-prepare"])
                self.fail(request, error("It cannot be had.", hint="Try later."))
                return
            done += 1
            if "full-prepare" in self.modes and done <= len(FULL_STEPS):
                self.emit(
                    api.PrepareProgress(request_id=request.request_id, **FULL_STEPS[done - 1])
                )
                continue
            self.emit(
                api.PrepareProgress(
                    request_id=request.request_id,
                    step="convert",
                    done=min(done, 9),
                    total=10,
                    unit="layers",
                    detail="layer",
                )
            )
            time.sleep(0.005)  # steps a watcher can see one by one
        self.end_preparation(request)

    def prepare_layers(self, request: api.PrepareModel, path: str) -> None:
        """Does what is not done yet of ten layers; is killed in the middle of all of them."""
        with open(path, "a+") as file:
            file.seek(0)
            num_done = len(file.readlines())
            for layer in range(num_done, 10):
                print(layer, file=file, flush=True)
                self.emit(
                    api.PrepareProgress(
                        request_id=request.request_id, step="convert", done=layer + 1, total=10,
                        unit="layers",
                    )
                )  # fmt: skip
                if not num_done and layer == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
        self.end_preparation(request)

    def end_preparation(self, request: api.PrepareModel) -> None:
        if "marker" in self.modes:
            with open(self.modes["marker"], "w"):
                pass
        self.emit(
            api.PrepareDone(
                request_id=request.request_id, model=request.model, precision=request.precision
            )
        )

    def plan(self, request: api.PlanModel) -> None:
        is_refused = "plan-refused" in self.modes
        self.emit(
            api.PlanMade(
                request_id=request.request_id,
                model=request.model,
                title="Fake MoE",
                machine=request.machine or MACHINE,
                memory_bytes=request.config.memory_bytes or 7 * 2**30,
                context_length=2048,
                num_prompt_tokens=512,
                alternatives=ALTERNATIVES[1:] if is_refused else ALTERNATIVES,
                notes=("Something was assumed.",),
                refusal="This model needs 1.0 GiB: 5.0 MiB short." if is_refused else "",
                hint="Give at least --memory 1024MiB." if is_refused else "",
            )
        )

    def describe(self, request: api.DescribeMachine) -> None:
        facts = FACTS
        if "no-link" in self.modes:
            broken = api.MachineFact(
                code="link", text="no disk", mark=api.FactMark.PROBLEM, hint="Mend it."
            )
            facts = (*FACTS, broken)
        self.emit(api.MachineDescribed(request_id=request.request_id, facts=facts))

    def profile(self, request: api.ProfileModel) -> None:
        if "fail-profile" in self.modes:
            self.fail(request, api.BudgetError("There is no room to measure.", hint="More."))
            return
        for done in range(1, 4):
            self.emit(
                api.ProfileProgress(request_id=request.request_id, done=done, total=3, detail="K 2")
            )
        profile = api.KProfile(best=2, acceptance=0.8, results=())
        self.emit(
            api.ProfileDone(request_id=request.request_id, model=request.model, profile=profile)
        )

    def evaluate(self, request: api.EvaluateModel) -> None:
        if "fail-evaluate" in self.modes:
            error = api.StoreError("It is not prepared in int8.", hint="Run: mira-chat prepare")
            self.fail(request, error)
            return
        done = 0
        while done < 10 or "slow-evaluate" in self.modes:
            if request.request_id in self.cancelled:
                self.fail(request, api.CancelledError("Stopped."))
                return
            self.emit(
                api.EvaluationProgress(
                    request_id=request.request_id, done=min(done, 9), total=10, detail="int8 reads"
                )
            )
            done += 1
            time.sleep(0.005)  # steps a watcher can see one by one
        report = dataclasses.replace(
            EVALUATION,
            model=request.model,
            dtype=request.config.arithmetic,
            notes=(f"{request.max_tokens} tokens", *request.precisions, *request.files),
        )
        self.emit(api.EvaluationDone(request_id=request.request_id, report=report))

    def load(self, request: api.LoadModel) -> None:
        if "fail-load" in self.modes:
            self.fail(
                request,
                api.BudgetError("The budget is 1 MiB, at least 20.0 MiB are needed.", hint="More."),
            )
            return
        self.emit(api.Notice(code="budget-default", text="The budget is 75 % of the experts."))
        self.emit(
            api.ModelLoaded(
                request_id=request.request_id,
                model=request.model,
                title="Fake MoE",
                context_length=2048,
                plan=PLAN,
                load_s=0.1,
            )
        )

    def reconfigure(self, request: api.Reconfigure) -> None:
        self.emit(
            api.ModelLoaded(
                request_id=request.request_id,
                model="builtin",
                title="Fake MoE",
                context_length=2048,
                plan=PLAN,
                load_s=0.0,
                is_cache_kept=True,
            )
        )

    @property
    def thoughts(self) -> tuple[str, ...]:
        return THOUGHTS if "thinking" in self.modes else ()

    def begin(self, request: api.Generate) -> None:
        """Sends what comes before the first token of an answer."""
        if "trimmed" in self.modes:
            self.emit(
                api.ContextTrimmed(
                    request_id=request.request_id, num_turns=4, num_tokens=1900, limit=2048
                )
            )
        for word in self.thoughts:
            self.emit(
                api.TokenDelta(
                    request_id=request.request_id,
                    text=word,
                    num_tokens=1,
                    part=api.ReplyPart.THINKING,
                )
            )

    def generate(self, request: api.Generate) -> None:
        self.begin(request)
        words = ESCAPES if "escapes" in self.modes else () if "empty" in self.modes else WORDS
        if "echo" in self.modes:
            words = [f"{each.role}: {each.content}\n" for each in request.messages]
        text, reason, num = "", api.FinishReason.STOP, 0
        while num < len(words) or "slow" in self.modes:
            if request.request_id in self.cancelled:
                reason = api.FinishReason.CANCELLED
                break
            word = words[num % len(words)]
            text += word
            num += 1
            self.emit(api.TokenDelta(request_id=request.request_id, text=word, num_tokens=1))
            self.emit(api.StatsSample(request_id=request.request_id, stats=STATS))
            if "residency" in self.modes:
                self.emit(
                    api.ResidencySample(
                        request_id=request.request_id, regions=("HS.s",), heat=("9501",)
                    )
                )
            if num == 3 and self.must_die():
                os.kill(os.getpid(), signal.SIGKILL)
            if num == 2 and "fail-reply" in self.modes:
                self.fail(request, api.ContextLengthError("The prompt is too long.", hint="Less."))
                return
            time.sleep(0.01)  # tokens at a pace that leaves time to stop or kill
        self.emit(
            api.GenerationDone(
                request_id=request.request_id,
                text=text,
                reason=reason,
                stats=STATS,
                thinking="".join(self.thoughts),
            )
        )

    def must_die(self) -> bool:
        if "die-once" in self.modes and os.path.exists(self.modes["die-once"]):
            os.remove(self.modes["die-once"])
            return True
        return "die-mid-reply" in self.modes

    def fail(self, request: api.Request, error: api.MiraError) -> None:
        self.emit(api.RequestFailed(request_id=request.request_id, **error.to_fields()))


if __name__ == "__main__":
    sys.exit(FakeEngine(sys.argv[1:]).run())
