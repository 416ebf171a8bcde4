"""Command line: argument wiring only, one function a command. Heavy imports live inside the commands, so `--help` is
instant."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from flashdraft import __version__
from flashdraft import cli_options as shared
from flashdraft.cli_bench import BenchCommand, bench
from flashdraft.cli_card import card
from flashdraft.cli_compare import compare as compare_runs
from flashdraft.cli_doctor import doctor
from flashdraft.cli_eval import PREPARE_HINT, EvalCommand, evaluate
from flashdraft.cli_fit import fit
from flashdraft.cli_options import ListOptions
from flashdraft.cli_quantize import publish, quantize
from flashdraft.cli_serve import ServeCommand, serve
from flashdraft.cli_synthesize import synthesize
from flashdraft.errors import ConfigError, FlashdraftError, as_options

CONTROL = r"[\x00-\x09\x0b-\x1f\x7f-\x9f]"

app = typer.Typer(
    name="flashdraft",
    help="Answers from a large language model, sooner: a DFlash draft guesses, the target checks, the text stays the target's.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

DraftOption = Annotated[str | None, typer.Option("--draft", help="Directory or hub id of the target's draft, or `builtin`.")]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="The target alone.")]
ModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt and answer together, in tokens.")]
Proposals = Annotated[int | None, typer.Option("--num-speculative-tokens", help="Proposals verified a step; 0 verifies none.")]
NumSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", min=1, help="Prompts answered at once; without it 16, on a GPU 64.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="On a GPU too, the same bits with any draft or none and in any batch; slower.")
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="On a GPU no CUDA graphs: starts sooner, runs slower.")]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        help="Launch each step before the one before is read, on a GPU in fused kernels. Without it: on a GPU, not on the CPU."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Of the likeliest tokens those that make up this share; 1: all.")]
TopK = Annotated[int, typer.Option("--top-k", help="0: all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Tokens with this share of the likeliest one's probability; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text, with any draft or none.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"flashdraft {__version__}")
        raise typer.Exit


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, the built-in ones.")] = None,
    target: shared.TargetOption = None,
    draft: DraftOption = None,
    no_draft: NoDraft = False,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", help="JSONL file of {turns: [...]}, {messages: [...]} or {prompt: ...}.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts, the categories in turn.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run with and without the draft: speed, acceptance, equal text.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of --compare; without it 1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the answer; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answer until --max-tokens.")] = False,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    draft_revision: shared.DraftRevision = None,
    lora: shared.Lora = None,
    max_model_len: ModelLen = None,
    num_speculative_tokens: Proposals = None,
    max_num_seqs: NumSeqs = None,
    gpu_memory_utilization: shared.MemoryShare = 0.9,
    deterministic: Deterministic = False,
    enforce_eager: EnforceEager = False,
    async_scheduling: AsyncScheduling = None,
) -> None:
    """Answer prompts; with --compare the same prompts with and without the draft."""
    from flashdraft import builtin, terminal
    from flashdraft.engine.request import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    chosen = terminal.choose_prompts(prompts, prompts_file, limit)
    _refuse_beside_compare(compare, rounds, max_num_seqs, no_draft or raw)
    if compare:
        builtin.refuse_trained_on(chosen, target, draft)
    llm = _load(
        target,
        draft,
        no_draft,
        dtype=dtype,
        device=device,
        revision=revision,
        draft_revision=draft_revision,
        lora=lora,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        deterministic=deterministic,
        enforce_eager=enforce_eager,
        async_scheduling=async_scheduling,
        max_num_seqs=max_num_seqs or (1 if compare else terminal.places(chosen)),  # a comparison asks one at a time
        kv_cache_share=terminal.SHARE_OF_COMPARED if compare else None,
    )
    if compare:
        names = terminal.pair_names(target, draft, revision, draft_revision, lora)
        terminal.run_comparison(llm, chosen, params, rounds or 1, as_json, names)
    else:
        terminal.run_generation(llm, chosen, params, raw, as_json)


@app.command()
def chat(
    target: shared.TargetOption = None,
    draft: DraftOption = None,
    no_draft: NoDraft = False,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Address of an OpenAI-compatible server to talk with, instead of a pair; FLASHDRAFT_API_KEY."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    thinking: Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking for the template.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    draft_revision: shared.DraftRevision = None,
    lora: shared.Lora = None,
    max_model_len: ModelLen = None,
    num_speculative_tokens: Proposals = None,
    gpu_memory_utilization: shared.MemoryShare = 0.9,
    deterministic: Deterministic = False,
    enforce_eager: EnforceEager = False,
    async_scheduling: AsyncScheduling = None,
) -> None:
    """Talk with the model; its thinking is shown apart. /help lists the commands, /quit or Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - with it, input() edits lines and remembers them; Windows has none

    from flashdraft import terminal
    from flashdraft.engine.request import SamplingParams

    template = {} if thinking is None else {"enable_thinking": thinking}
    sampling: dict[str, Any] = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens)
    if endpoint is not None:
        if target or draft or no_draft:
            raise ConfigError("--endpoint takes the server's own model: leave out --target, --draft and --no-draft")
        own = {} if seed is None else {"seed": seed}
        key = os.environ.get("FLASHDRAFT_API_KEY") or os.environ.get("OPENAI_API_KEY")
        terminal.run_chat(terminal.remote(endpoint, key, template, **sampling, **own), system)
        return
    llm = _load(
        target,
        draft,
        no_draft,
        dtype=dtype,
        device=device,
        revision=revision,
        draft_revision=draft_revision,
        lora=lora,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        deterministic=deterministic,
        enforce_eager=enforce_eager,
        async_scheduling=async_scheduling,
        max_num_seqs=1,
    )
    terminal.run_chat(terminal.LocalTalk(llm, SamplingParams(**sampling, seed=seed), template), system)


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="A draft or a target: directory, config.json, .gguf file or hub id; `builtin` for our draft.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Check that a draft fits this target: directory, .gguf file or hub id; `builtin` for the built-in one."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of PATH: on the hub, or a sub-directory of a local draft.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of the request whose KV cache is told; without it the longest there is.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Configuration, parameters by part, dtype, size on disk, KV cache of a request; with --target whether the pair fits."""
    from flashdraft import terminal

    terminal.run_inspection(path, target, revision, max_model_len, as_json)


app.command(cls=ListOptions)(synthesize)


@app.command(cls=ListOptions)
def train(
    data: Annotated[
        Path, typer.Option("--data", help="Directory of answers that `flashdraft synthesize` made with this target.")
    ],
    output: Annotated[Path, shared.output("Directory for the draft; what resumes it is in its `run`.")],
    target: shared.TargetArgument = None,
    recipe: shared.RecipeFile = None,
    init: shared.Init = None,
    features: Annotated[
        str, typer.Option("--features", help="online: by the target as it goes; offline: cached on disk beside the data.")
    ] = "online",
    steps: Annotated[int | None, typer.Option("--steps", help="Updates, instead of the recipe's.")] = None,
    hours: Annotated[float | None, typer.Option("--hours", help="Time to train for, instead of the recipe's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output, exactly where it was.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, time a few steps, write nothing.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard to OUTPUT/run.")] = False,
    dtype: shared.Dtype = "auto",
    device: shared.Device = None,
    revision: shared.Revision = None,
    lora: shared.Lora = None,
    target_parallel: Annotated[
        int, typer.Option(min=1, help="Processes of torchrun that hold one target together, for one that fits no single GPU.")
    ] = 1,
) -> None:
    """Train a draft on a target's own answers; several GPUs with `torchrun -m flashdraft train ...`."""
    from flashdraft.train.commands_train import run_train
    from flashdraft.train.prepare import Options

    if features not in ("online", "offline"):
        raise ConfigError(f"--features must be online or offline, got {features!r}")
    run_train(
        Options(
            data=data,
            output=output,
            target=target,
            recipe=recipe,
            init=init,
            features="offline" if features == "offline" else "online",
            resume=resume,
            dry_run=dry_run,
            tensorboard=tensorboard,
            steps=steps,
            hours=hours,
            dtype=dtype,
            device=device,
            revision=revision,
            lora=lora,
            target_parallel=target_parallel,
        )
    )


app.command(cls=ListOptions)(fit)
app.command(cls=ListOptions)(quantize)
app.command("eval", cls=EvalCommand, epilog=PREPARE_HINT)(evaluate)
app.command("compare")(compare_runs)
app.command(cls=BenchCommand)(bench)
app.command(cls=ListOptions)(card)
app.command()(publish)
app.command()(doctor)
app.command(cls=ServeCommand)(serve)


def _refuse_beside_compare(compare: bool, rounds: int | None, max_num_seqs: int | None, no_chat: bool) -> None:
    if rounds is not None and not compare:
        raise ConfigError("--rounds is an option of --compare: add that, or leave --rounds out")
    if compare and max_num_seqs not in (None, 1):
        raise ConfigError("--compare answers one prompt at a time: leave out --max-num-seqs")
    if compare and no_chat:
        raise ConfigError("--compare needs a draft and chat prompts: leave out --no-draft and --raw")


def _load(target: str | None, draft: str | None, no_draft: bool, **options: Any) -> Any:
    from flashdraft import terminal

    if draft and no_draft:
        raise ConfigError("--draft and --no-draft contradict each other: give one of them")
    return terminal.load(target, False if no_draft else draft, **{k: v for k, v in options.items() if v is not None})


def main() -> None:
    """Entry point: what the user can mend is one line on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the answer's letters shows "?" instead of a traceback
    try:
        app()
    except FlashdraftError as error:
        # What a server or a file said may hold what a terminal takes for commands.
        print(f"flashdraft: {re.sub(CONTROL, ' ', as_options(error))}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        raise
    except OSError as error:  # a name that is too long, a file that may not be read, a full disk
        named = "" if error.filename is None else f"{str(error.filename)[:200]}: "
        print(f"flashdraft: {named}{error.strerror or error}: mend that and give the same command again", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as ended:  # typer turns the one into the other
        code = 130 if isinstance(ended, KeyboardInterrupt) else ended.code
        if code == 130:
            print(file=sys.stderr)  # so that the shell's prompt does not stand behind ^C
        sys.exit(code)
