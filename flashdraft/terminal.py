"""What the commands show: streamed answers, the comparison table, chat, inspection. rich only; no decisions."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flashdraft import builtin
from flashdraft.client import Client, ServerError
from flashdraft.compare import Comparison, Summary, Turn, compare, load_average
from flashdraft.engine.request import SamplingParams
from flashdraft.errors import ConfigError, RequestError, as_options, counted
from flashdraft.inspection import inspect_path
from flashdraft.inspection_display import render
from flashdraft.llm import LLM, Completion, RequestOutput
from flashdraft.prompts import LOOP, Prompt, read_prompts, round_robin
from flashdraft.text import Kind, ThinkSplit
from flashdraft.thinking import THINK, format_of

# Lines are left for the terminal to wrap: a break put in here would be copied with the text, and stay when the window grows.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)

SHARE_OF_COMPARED = 0.4  # of a GPU's KV cache, for the engine with the draft; the other's steps come out of the rest too

DIFFERS = (
    "Where two tokens are nearly tied, rounding decides, and it may depend on the number of rows computed at once: both "
    "texts are the target's own up to rounding. Expected on a GPU without --deterministic, in float16, and with mixtures of "
    "experts or GPT-2; --dtype float32 makes it rare. With any other target on the CPU it is an error of flashdraft: please "
    "report it with the output of --json."
)
CHAT_HELP = """\
/help    shows this
/reset   starts a new conversation
/quit    ends, as Ctrl-D does
Ctrl-C   stops an answer; at the prompt it ends"""


def load(target: str | None, draft: str | Literal[False] | None, **options: Any) -> LLM:
    """Load a pair, saying so while it takes; of a GPU, which layers are fused and where its memory went; and what is odd."""
    with err.status(escape(f"loading {target or 'the built-in pair'}")):
        llm = LLM(target, draft, **options)
    if llm.engine.fusion is not None:
        err.print(str(llm.engine.fusion), style="dim", markup=False, soft_wrap=True)
    if llm.engine.memory is not None:
        err.print(f"GPU memory {llm.engine.memory}", style="dim", markup=False, soft_wrap=True)
    if llm.warning is not None:
        err.print(f"flashdraft: {llm.warning}", style="yellow", markup=False, soft_wrap=True)
    return llm


def places(prompts: Sequence[Prompt]) -> int | None:
    """Sequences to have places for: no more than there are prompts, as a GPU starts sooner then; None for the default."""
    return len(prompts) if len(prompts) < 16 else None


def pair_names(
    target: str | None, draft: str | None, revision: str | None, draft_revision: str | None, lora: str | None = None
) -> dict[str, str | None]:
    """What a comparison was of: the names that give the same pair again."""
    own = builtin.NAME if target in (None, builtin.NAME) else None
    return {
        "target": target or builtin.NAME,
        "target_revision": revision,
        "lora": lora,
        "draft": draft or own,
        "draft_revision": draft_revision,
    }


def choose_prompts(texts: Sequence[str] | None, file: Path | None, limit: int | None) -> list[Prompt]:
    """Prompts from the command line, a file, or the built-in ones; `limit` takes the categories in turn."""
    if texts and file:
        raise ConfigError("give prompts as arguments or with --prompts FILE, not both")
    if texts:
        if not all(text.strip() for text in texts):
            raise ConfigError("a prompt is empty: give some text")
        prompts = [Prompt(str(i), "argument", (text,)) for i, text in enumerate(texts)]
    else:
        prompts = read_prompts(file or builtin.PROMPTS)
    return round_robin(prompts, limit) if limit else prompts


def run_generation(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, raw: bool, as_json: bool) -> None:
    """One prompt is streamed; several are answered in batches, turn by turn, and printed in order."""
    if raw and any(len(p.turns) > 1 or p.system for p in prompts):
        raise ConfigError("--raw takes prompts of one turn and no system prompt: leave it out for conversations")
    if len(prompts) == 1 and len(prompts[0].turns) == 1 and not as_json:
        text = prompts[0].turns[0]
        messages = [*prompts[0].opening, {"role": "user", "content": text}]
        for delta in llm.stream(text, params) if raw else llm.chat(messages, params, stream=True):
            print(delta.text, end="", flush=True)
        print()
        return
    with err.status(f"answering {len(prompts)} prompts"):
        answers = _answer_all(llm, prompts, params, raw)
    for prompt, results in zip(prompts, answers, strict=True):
        if not as_json:
            out.rule(Text(f"{prompt.id} {prompt.category}".strip()), align="left")
        for turn, (text, result) in enumerate(zip(prompt.turns, results, strict=True)):
            if as_json:
                print(json.dumps(_answer_json(prompt, turn, result), ensure_ascii=False))
            else:
                out.print(text, style="bold", markup=False)
                out.print(result.text, markup=False)


def _answer_all(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, raw: bool) -> list[list[RequestOutput]]:
    """The answer to every turn of every prompt; the conversations go on side by side."""
    if raw:
        return [[result] for result in llm.generate([p.turns[0] for p in prompts], params)]
    conversations = [list(p.opening) for p in prompts]
    answers: list[list[RequestOutput]] = [[] for _ in prompts]
    for turn in range(max(len(p.turns) for p in prompts)):
        going_on = [i for i, p in enumerate(prompts) if turn < len(p.turns)]
        for i in going_on:
            conversations[i].append({"role": "user", "content": prompts[i].turns[turn]})
        for i, result in zip(going_on, llm.chat([conversations[i] for i in going_on], params), strict=True):
            answers[i].append(result)
            conversations[i].append({"role": "assistant", "content": result.text})
    return answers


def _answer_json(prompt: Prompt, turn: int, result: RequestOutput) -> dict[str, Any]:
    answer = result.outputs[0]
    return {
        "id": prompt.id,
        "category": prompt.category,
        "turn": turn,
        "prompt": prompt.turns[turn],
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "completion_tokens": len(answer.token_ids),
        "prompt_tokens": len(result.prompt_token_ids),
        "acceptance_length": answer.acceptance_length,
    }


def run_comparison(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    rounds: int,
    as_json: bool,
    names: Mapping[str, str | None],
) -> None:
    """Both arms over all prompts; exits with code 1 if any text differs."""
    if llm.engine.draft is None:
        raise ConfigError("--compare needs a draft: give --draft, or leave out --target for the built-in pair")
    warn_of_load()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("with and without the draft", total=rounds * sum(len(p.turns) for p in prompts))

        def report(turn: Turn) -> None:
            progress.advance(task)

        result = compare(llm, prompts, params, rounds=rounds, report=report, names=names)
    if as_json:
        print(json.dumps({**result.to_json(), "command": sys.argv}, indent=1))
    else:
        show_comparison(result)
    if not all(turn.identical for turn in result.turns):
        sys.exit(1)


def warn_of_load() -> None:
    """Timings are of this program only while no other one wants its cores."""
    load, cores = load_average(), os.cpu_count() or 1
    if load is not None and load > cores:
        err.print(
            f"flashdraft: the load average is {load:.1f} on {cores} cores: other programs may slow this one, and its timings "
            "would be wrong. Measure again when they are done",
            style="yellow",
        )


def show_comparison(result: Comparison) -> None:
    table = Table(title="tokens/s with and without the draft", title_justify="left")
    for name in ("prompts", "answers", "tokens", "without", "with", "ratio", "AL", "same"):
        table.add_column(name, justify="left" if name == "prompts" else "right", no_wrap=True)
    for name, summary in sorted(result.by_category().items()):
        table.add_row(escape(name), *_cells(summary))
    table.add_section()
    whole, clean = result.summary(), result.without_loops()
    assert whole is not None
    table.add_row("all", *_cells(whole), style="bold")
    loops = sum(turn.loops for turn in result.turns)
    if clean is not None and loops:
        table.add_row("not looping", *_cells(clean), style="bold")
    out.print(table)
    s = result.setup
    positions = " ".join(f"{share:.2f}" for share in whole.acceptance_by_position)
    out.print(f"acceptance by position: {positions}")
    if whole.acceptance_length is not None and whole.acceptance_length_pooled is not None:
        mean, pooled = whole.acceptance_length, whole.acceptance_length_pooled
        out.print(f"acceptance length: {mean:.2f} mean over requests, {pooled:.2f} over steps")
    out.print(f"answers with an 8-gram repetition above {LOOP}: {loops} of {whole.answers}")
    if result.row_padding_cost is not None:
        out.print(f"without the draft, 8-row padding takes {result.row_padding_cost:.2f} of the time of 1-row decoding")
    if differing := result.differing:
        shown = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
        count = whole.answers - whole.identical
        text = f"texts with and without the draft: DIFFERENT for {count} of {whole.answers} answers (prompts {shown})"
        out.print(text, style="red", markup=False)
        out.print(DIFFERS)
    else:
        out.print("texts with and without the draft: identical", style="green")
    if "target" in s:
        out.print(f"target {s['target']}; draft {s['draft']}", style="dim", markup=False)
    out.print(
        f"{s['device']}; {counted(s['threads'], 'thread')}; {s['dtype']}; torch {s['torch']}; transformers {s['transformers']}",
        style="dim",
    )


def _cells(s: Summary) -> Iterable[str]:
    yield from (str(s.answers), str(s.tokens), f"{s.tokens_per_second_off:.1f}", f"{s.tokens_per_second_on:.1f}")
    length = "-" if s.acceptance_length is None else f"{s.acceptance_length:.2f}"
    yield from (f"{s.speedup:.2f}", length, f"{s.identical}/{s.answers}")


class Talk(Protocol):
    """Whoever answers in `chat`."""

    def answer(self, messages: list[dict[str, str]]) -> Iterator[tuple[Kind, str]]:
        """The pieces of an answer, thinking told apart."""

    def numbers(self) -> str | None:
        """Of the last answer."""


class LocalTalk:
    """A pair in this process."""

    def __init__(self, llm: LLM, params: SamplingParams, template: dict[str, Any]) -> None:
        self._llm, self._params, self._template = llm, params, template
        self._format = format_of(llm.tokenizer) or THINK
        if self._format.start in llm.tokenizer.all_special_tokens:  # without text it could not be told apart
            self._params = replace(params, skip_special_tokens=False)
        self._final: Completion | None = None

    def answer(self, messages: list[dict[str, str]]) -> Iterator[tuple[Kind, str]]:
        form = self._format
        split, self._final = ThinkSplit(form.start + form.label, form.end), None
        for delta in self._llm.chat(messages, self._params, stream=True, chat_template_kwargs=self._template):
            yield from split.push(delta.text)
            if delta.finish_reason:
                yield from split.finish()
            self._final = delta.completion or self._final

    def numbers(self) -> str | None:
        if self._final is None or self._final.acceptance_length is None:
            return None
        return f"{len(self._final.token_ids)} tokens, acceptance length {self._final.acceptance_length:.2f}"


class RemoteTalk:
    """A server that speaks OpenAI's chat completions. `body` is what every request holds beside its messages."""

    def __init__(self, client: Client, body: Mapping[str, Any]) -> None:
        self._client, self._body = client, body
        self._last: dict[str, Any] = {}

    def answer(self, messages: list[dict[str, str]]) -> Iterator[tuple[Kind, str]]:
        split, self._last = ThinkSplit(), {}
        for event in self._client.stream({**self._body, "messages": messages}):
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield "thinking", str(thought)
                yield from split.push(str(delta.get("content") or ""))
            self._last = event if event.get("usage") else self._last
        yield from split.finish()

    def numbers(self) -> str | None:
        if not self._last:
            return None
        length = (self._last.get("metrics") or {}).get("speculative_decoding", {}).get("mean_acceptance_length")
        tokens = f"{self._last['usage'].get('completion_tokens')} tokens"
        return tokens if length is None else f"{tokens}, acceptance length {length:.2f}"


_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def remote(endpoint: str, key: str | None, template: dict[str, Any], **body: Any) -> RemoteTalk:
    """A server to talk with, and its first model. Raises ServerError and ConfigError."""
    client = Client(endpoint, api_key=key, retries=0)
    models = client.models()
    if not models:
        raise ConfigError(f"{endpoint} offers no model")
    err.print(f"{models[0]} at {endpoint}", style="dim", markup=False)
    body = {name: value for name, value in body.items() if _NEUTRAL.get(name) != value}  # not every server knows them
    return RemoteTalk(client, {"model": models[0], **body, **({"chat_template_kwargs": template} if template else {})})


def run_chat(talk: Talk, system: str | None) -> None:
    """A conversation on the terminal. Turn 2 carries the answers' content, not their thinking."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    out.print("/help lists the commands, /quit or Ctrl-D ends", style="dim")
    while True:
        try:
            line = input("> ")  # not rich's, which hides the prompt from readline
        except EOFError:
            out.print()
            return
        command = line.strip()
        if command == "/quit":
            return
        if re.fullmatch("/[a-z]+", command):
            if command == "/reset":
                messages = list(start)
            else:
                out.print(CHAT_HELP if command == "/help" else f"there is no command {command}: /help lists them", style="dim")
            continue
        if not command:
            continue
        messages.append({"role": "user", "content": line})
        answer = _chat_turn(talk, messages)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _chat_turn(talk: Talk, messages: list[dict[str, str]]) -> str | None:
    """Stream one answer; its content, or None if it was interrupted or refused."""
    answer = ""
    try:
        for kind, text in talk.answer(messages):
            out.print(text, end="", style="dim italic" if kind == "thinking" else None, markup=False)
            answer += text if kind == "answer" else ""
    except KeyboardInterrupt:
        out.print("\ninterrupted", style="dim")
        return None
    except (RequestError, ServerError) as error:
        err.print(f"flashdraft: {as_options(error)} (/reset starts a new conversation)", markup=False)
        return None
    out.print()
    if numbers := talk.numbers():
        out.print(numbers, style="dim")
    return answer


def run_inspection(path: str, target: str | None, revision: str | None, tokens: int | None, as_json: bool) -> None:
    where = str(builtin.draft_path()) if path == builtin.NAME else path
    target = str(builtin.target_path()) if target == builtin.NAME else target
    inspection = inspect_path(where, target=target, revision=revision, max_model_len=tokens)
    if as_json:
        print(json.dumps(inspection.to_json(), indent=1))
    else:
        out.print(render(inspection))
    if inspection.misfit is not None:
        sys.exit(1)
