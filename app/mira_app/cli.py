"""The command line: `mira-chat` and its subcommands.

Imports only what parses arguments; each command imports its own parts when it runs.
How commands end is in `reporting`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .reporting import reporting_errors, reporting_streams

if TYPE_CHECKING:
    from typing import TextIO

    from .answer import Answer, Answerer
    from .catalog import Catalog
    from .engine_client import EngineClient
    from .settings import Settings

FIXED_QUESTION = "In one sentence: what is a cache?"
"""What `mira-chat` asks where there is no terminal to chat in."""

FIXED_MAX_TOKENS = 48

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Chat in the terminal with Mixture-of-Experts models that do not fit the memory you "
    "give them.",
)

_MODEL, _ENGINE, _REPLY, _OUTPUT = "Model", "Engine", "Reply", "Output"


def _option(*names: str, help: str, metavar: str | None = None) -> object:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


Model = Annotated[str | None, _option("--model", metavar="M", help="`builtin`, or a folder.")]
Budget = Annotated[
    str | None,
    _option(
        "--budget",
        metavar="300MiB|40%",
        help="Device memory for experts, draft and slots together; % of all experts in INT8.",
    ),
]
Memory = Annotated[
    str | None,
    _option(
        "--memory",
        metavar="8GiB",
        help="All that the engine may hold on the device; without --budget, experts get the rest.",
    ),
]
DraftTokens = Annotated[
    int | None, _option("-k", metavar="K", help="Draft tokens per round; 0 turns drafting off.")
]
Target = Annotated[
    str | None,
    _option(
        "--precision",
        metavar="P",
        help="Expert format of the target: nested, int8, bf16, int4 or float32.",
    ),
]
Dtype = Annotated[
    str | None, _option("--dtype", metavar="D", help="Arithmetic: bfloat16 or float32.")
]
MaxTokens = Annotated[
    int | None,
    _option("--max-tokens", metavar="N", help="Most tokens of the reply; 1024 without it."),
]
Temperature = Annotated[
    float | None, _option("--temperature", metavar="T", help="0 takes the likeliest token.")
]
TopK = Annotated[int | None, _option("--top-k", metavar="N", help="Keep the N likeliest tokens.")]
TopP = Annotated[float | None, _option("--top-p", metavar="P", help="Keep this much probability.")]
MinP = Annotated[
    float | None, _option("--min-p", metavar="P", help="Drop tokens below this share of the top.")
]
Penalty = Annotated[
    float | None,
    _option("--repetition-penalty", metavar="R", help="Above 1: repeats become less likely."),
]
Seed = Annotated[int | None, _option("--seed", metavar="S", help="Seed of the random numbers.")]
System = Annotated[
    str | None,
    _option("--system", metavar="TEXT", help="System prompt; without it, the model's own."),
]
Context = Annotated[
    int | None, _option("--context", metavar="N", help="Tokens of context to keep room for.")
]
LinkRate = Annotated[
    str | None,
    _option("--link-rate", metavar="500MB", help="Hold the expert link to this rate per second."),
]
LinkLatency = Annotated[
    float | None, _option("--link-latency", metavar="MS", help="Add milliseconds to each record.")
]
Threads = Annotated[
    int | None,
    _option("--threads", metavar="N", help="Threads of the arithmetic; all cores but one else."),
]
Compile = Annotated[
    str | None,
    _option(
        "--compile",
        metavar="WHEN",
        help="Compile steps: auto (beside the chat, once), wait (before the first reply) or off.",
    ),
]
DraftDense = Annotated[
    str | None,
    _option(
        "--draft-dense",
        metavar="HOW",
        help="What a draft reads of dense layers: auto, split (half of each weight), "
        "int8 (copies) or target (all).",
    ),
]
DraftExperts = Annotated[
    str | None,
    _option(
        "--draft-experts",
        metavar="WHICH",
        help="Which experts a draft computes with: all (in INT4, resident), cached (those in "
        "the slots, no memory) or auto.",
    ),
]
NoPrefetch = Annotated[bool, typer.Option("--no-prefetch", help="Load experts on demand only.")]
NoPredictors = Annotated[
    bool,
    typer.Option("--no-predictors", help="Train none; the model chats without them."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Train predictors on the prompts of a text file, blank lines between them.",
        show_default=False,
    ),
]
Trace = Annotated[
    str | None,
    _option("--trace", metavar="FILE", help="Record which experts each token chose in FILE."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines: no bars, no colours.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("mira-chat")
        except PackageNotFoundError:
            number = "(run from its source tree)"
        typer.echo(f"mira-chat {number}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def chat(
    context: typer.Context,
    model: Model = None,
    budget: Budget = None,
    memory: Memory = None,
    k: DraftTokens = None,
    precision: Target = None,
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    system: System = None,
    context_length: Context = None,
    link_rate: LinkRate = None,
    link_latency: LinkLatency = None,
    threads: Threads = None,
    compile_when: Compile = None,
    draft_experts: DraftExperts = None,
    draft_dense: DraftDense = None,
    no_prefetch: NoPrefetch = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Opens the chat. Without a terminal: prepares the model and answers one question."""
    del version
    flags = _flags(locals())
    if context.invoked_subcommand is not None:
        given = [name for name, value in flags.items() if value is not None]
        if given:
            raise typer.BadParameter(
                f"options come after the command: mira-chat {context.invoked_subcommand} --..."
            )
        return
    with reporting_errors():
        settings = _settings(flags)
        if _is_terminal(sys.stdin) and _is_terminal(sys.stdout):
            _open_app(settings)
        else:
            _answer_fixed_question(settings, has_own_limit=max_tokens is not None)


@app.command()
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; `-` or nothing reads standard input.")
    ] = None,
    model: Model = None,
    budget: Budget = None,
    memory: Memory = None,
    k: DraftTokens = None,
    precision: Target = None,
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    system: System = None,
    context_length: Context = None,
    link_rate: LinkRate = None,
    link_latency: LinkLatency = None,
    threads: Threads = None,
    compile_when: Compile = None,
    draft_experts: DraftExperts = None,
    draft_dense: DraftDense = None,
    no_prefetch: NoPrefetch = False,
    trace: Trace = None,
    is_json: Json = False,
    is_plain: Plain = False,
) -> None:
    """Answers one prompt: the reply alone on stdout, one line of figures on stderr."""
    flags = _flags(locals())
    from .answer import Answer

    answer = Answer()
    with reporting_errors(answer if is_json else None):
        settings = _settings(flags)
        _run(_read_prompt(prompt), settings, answer, is_json=is_json, is_plain=is_plain)


@app.command()
def prepare(
    model: Annotated[str, typer.Argument(help="`builtin`, or the folder of a checkpoint.")],
    precision: Target = None,
    no_predictors: NoPredictors = False,
    calibration: Calibration = None,
    is_plain: Plain = False,
) -> None:
    """Makes a model ready: fetches, checks, converts, trains predictors. Goes on where it was
    interrupted.
    """
    if no_predictors and calibration is not None:
        raise typer.BadParameter("--calibration makes predictors, --no-predictors makes none")
    with reporting_errors():
        settings = _settings({"model": model, "precision": precision})
        with make_client() as client:
            _answerer(client, settings, is_plain=is_plain).prepare(
                is_predicting=not no_predictors,
                calibration=None if calibration is None else str(calibration.absolute()),
            )
        typer.echo(f"{model} is ready in {settings.engine.precision}.", err=True)


@app.command()
def plan(
    model: Annotated[
        str | None, typer.Argument(help="`builtin`, or a folder with at least a config.json.")
    ] = None,
    budget: Budget = None,
    memory: Memory = None,
    k: DraftTokens = None,
    machine: Annotated[
        str | None,
        _option(
            "--machine",
            metavar="FILE|CARD",
            help="Plan for another machine: a card such as rtx-4070, or a file of rates.",
        ),
    ] = None,
    precision: Target = None,
    dtype: Dtype = None,
    context_length: Context = None,
    threads: Threads = None,
    compile_when: Compile = None,
    draft_dense: DraftDense = None,
    is_compact_allowed: Annotated[
        bool, typer.Option("--compact", help="Let INT4 experts answer, if that is the fastest.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Says where the memory would go and how fast replies would be; loads no weight."""
    given = dict(locals())
    own = ("machine", "is_compact_allowed", "is_json")
    flags = _flags({name: value for name, value in given.items() if name not in own})
    from .planning import PlanReporter

    reporter = PlanReporter(machine, is_compact_allowed=is_compact_allowed, is_json=is_json)
    with reporting_errors():
        reporter.report(lambda: _settings(flags), make_client, typer.echo)


@app.command()
def models(precision: Target = None, is_json: Json = False) -> None:
    """Lists the models one can pick."""
    with reporting_errors():
        wanted = _settings({"precision": precision}).engine.precision
        entries = make_catalog().entries(wanted)
        if is_json:
            import dataclasses
            import json

            typer.echo(json.dumps([dataclasses.asdict(entry) for entry in entries]))
            return
        for entry in entries:
            state = "ready" if entry.is_ready else "not prepared"
            typer.echo(f"{entry.model}\n    {entry.title}: {entry.about}\n    {wanted}: {state}")


@app.command()
def profile(
    model: Annotated[
        str | None, typer.Argument(help="`builtin`, or a folder; the chosen model without it.")
    ] = None,
    budget: Budget = None,
    precision: Target = None,
    dtype: Dtype = None,
    link_rate: LinkRate = None,
    link_latency: LinkLatency = None,
    threads: Threads = None,
    compile_when: Compile = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="5 prompts, once, and few K's: minutes, not hours.")
    ] = False,
    is_json: Json = False,
    is_plain: Plain = False,
) -> None:
    """Measures which K is fastest for a model on this machine, and keeps it for later chats."""
    flags = _flags(locals() | {"no_prefetch": False})
    with reporting_errors():
        settings = _settings(flags)
        with make_client() as client:
            found = _answerer(client, settings, is_plain=is_plain).profile(is_quick=is_quick)
        from .figures import profile_figures, profile_lines

        if is_json:
            import dataclasses
            import json

            whole = {"model": settings.model, **dataclasses.asdict(found)}
            typer.echo(json.dumps(whole | profile_figures(found)))
            return
        typer.echo("\n".join(profile_lines(found)))


@app.command()
def simulate(
    trace: Annotated[
        str | None,
        _option("--trace", metavar="FILE", help="Routing: of `run --trace`, or arrays in .npz."),
    ] = None,
    train: Annotated[
        str | None,
        _option("--train", metavar="FILE", help="Learn from this one, not from half of FILE."),
    ] = None,
    policy: Annotated[
        list[str] | None, _option("--policy", metavar="P", help="Only this one; repeatable.")
    ] = None,
    slots_per_layer: Annotated[
        list[int] | None,
        _option(
            "--slots-per-layer", metavar="N", help="Experts that a layer's slots hold; repeatable."
        ),
    ] = None,
    link_rate: Annotated[
        list[str] | None,
        _option("--link-rate", metavar="25GB", help="Link, per second; repeatable."),
    ] = None,
    record: Annotated[
        str | None, _option("--record", metavar="8MiB", help="Bytes of one whole expert.")
    ] = None,
    resident_ms: Annotated[
        float | None,
        _option("--resident-ms", metavar="MS", help="A token with every expert resident."),
    ] = None,
    draft_ms: Annotated[
        float | None, _option("--draft-ms", metavar="MS", help="A draft token.")
    ] = None,
    k: DraftTokens = None,
    acceptance: Annotated[
        float | None, _option("--acceptance", metavar="A", help="Of draft tokens, 0 to 1.")
    ] = None,
    fidelity: Annotated[
        float | None,
        _option("--fidelity", metavar="F", help="Share of experts the draft's routing names."),
    ] = None,
    max_tokens: Annotated[
        int | None, _option("--max-tokens", metavar="N", help="Most tokens to decode.")
    ] = None,
    seed: Seed = None,
    is_json: Json = False,
) -> None:
    """Compares caching and prefetching policies on a virtual clock, without a model."""
    given = dict(locals())
    from .simulation import run_simulation

    with reporting_errors():
        run_simulation(given, is_json=given.pop("is_json"), out=sys.stdout, err=sys.stderr)


# -- parts -----------------------------------------------------------------------------------


def make_client() -> EngineClient:
    """Makes the client of the engine process; nothing is started yet."""
    from mira_engine.api import default_engine_command

    from .engine_client import EngineClient
    from .paths import cache_dir, data_dir, log_dir

    command = default_engine_command(data_dir(), cache_dir())
    return EngineClient(command, log_dir=log_dir())


def make_catalog() -> Catalog:
    """Makes the catalog of the platform's data directory."""
    from .catalog import LibraryCatalog
    from .paths import data_dir

    return LibraryCatalog(data_dir())


def _flags(given: dict[str, object]) -> dict[str, object]:
    """Turns a command's arguments into settings by name; leaves out what is none."""
    names = {"context_length": "context", "compile_when": "compile"}
    left_out = ("context", "prompt", "is_json", "is_plain", "is_quick", "no_prefetch", "version")
    flags = {names.get(n, n): value for n, value in given.items() if n not in left_out}
    if flags.get("trace") is not None:
        flags["trace"] = str(Path(str(flags["trace"])).absolute())
    flags["prefetch"] = False if given.get("no_prefetch") else None
    return flags


def _settings(flags: dict[str, object]) -> Settings:
    from .settings import load_settings

    return load_settings(flags, os.environ)


def _read_prompt(given: str | None) -> str:
    from mira_engine.api import ConfigError

    if given in (None, "-"):
        if sys.stdin is None or (given is None and sys.stdin.isatty()):
            raise ConfigError("There is no prompt.", hint='Write: mira-chat run "your question".')
        # Not as the locale says: another encoding would pass for a strange question.
        with contextlib.suppress(AttributeError):
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        prompt = sys.stdin.read() if given in (None, "-") else given
        assert prompt is not None
        prompt.encode("utf-8")
    except UnicodeError:
        raise ConfigError(
            "The prompt is not UTF-8 text.", hint="Convert it, for example with iconv -t utf-8."
        ) from None
    if not prompt.strip():
        raise ConfigError("The prompt is empty.", hint="Ask something.")
    return prompt


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream can show bars and screens; a dumb terminal is as good as a file."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _answerer(client: EngineClient, settings: Settings, *, is_plain: bool) -> Answerer:
    from .answer import Answerer, BarProgress, LineProgress

    is_drawing = _is_terminal(sys.stderr) and not is_plain
    return Answerer(
        client,
        make_catalog(),
        settings,
        err=sys.stderr,
        make_progress=BarProgress if is_drawing else LineProgress,
    )


def _run(prompt: str, settings: Settings, answer: Answer, *, is_json: bool, is_plain: bool) -> None:
    # A terminal that cannot show a character gets a question mark, not a crash.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")
    with make_client() as client:
        answerer = _answerer(client, settings, is_plain=is_plain)
        try:
            answerer.ask(prompt, answer, None if is_json else sys.stdout)
        finally:
            if answer.stats.num_new_tokens and not is_json:
                typer.echo(answerer.stats_line(answer), err=True)
    if answer.reason.value == "cancelled":
        raise KeyboardInterrupt


def _answer_fixed_question(settings: Settings, *, has_own_limit: bool) -> None:
    import dataclasses

    from .answer import Answer

    if not has_own_limit:
        limit = min(settings.sampling.max_new_tokens or FIXED_MAX_TOKENS, FIXED_MAX_TOKENS)
        sampling = dataclasses.replace(settings.sampling, max_new_tokens=limit)
        settings = dataclasses.replace(settings, sampling=sampling)
    typer.echo("note: there is no terminal here; asking one question.", err=True)
    typer.echo(f"> {FIXED_QUESTION}", err=True)
    _run(FIXED_QUESTION, settings, Answer(), is_json=False, is_plain=True)


def _open_app(settings: Settings) -> None:
    from .controller import ChatController
    from .tui.app import MiraApp

    client = make_client()
    try:
        MiraApp(ChatController(client, make_catalog(), settings)).run()
    finally:
        client.close()


def main() -> None:
    """Runs the command line."""
    with reporting_streams():
        app(prog_name=Path(sys.argv[0]).name if sys.argv[0].endswith("mira-chat") else "mira-chat")


if __name__ == "__main__":
    main()
