"""What a draft is worth: real decoding of held-out prompts with and without it, as many as the time is enough for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashdraft import terminal
from flashdraft.compare import compare
from flashdraft.engine.request import SamplingParams
from flashdraft.errors import counted
from flashdraft.llm import LLM
from flashdraft.prompts import Prompt
from flashdraft.train.commands_synthesize import Where
from flashdraft.train.conversations import Renderer
from flashdraft.train.display import err
from flashdraft.train.synthesize import SynthesisConfig

MOST_PROMPTS, MOST_TOKENS = 64, 256
LEAST_PROMPTS, LEAST_TOKENS = 4, 16
ARMS = 2.25  # with, without, and every fourth prompt without row padding


def measure_worth(
    where: Where, draft: Path, name: str, prompts: Sequence[Prompt], config: SynthesisConfig, seconds: float
) -> dict[str, Any]:
    """Both arms over `prompts`, sampled as the answers were, for about so many seconds; prints the table and returns it.

    name: what the draft in the directory `draft` will be called.
    """
    start = time.monotonic()
    llm = terminal.load(
        where.target,
        str(draft),
        dtype=where.dtype,
        device=where.device,
        revision=where.revision,
        lora=where.lora,
        max_num_seqs=1,
        kv_cache_share=terminal.SHARE_OF_COMPARED,
    )
    terminal.warn_of_load()
    renderer = Renderer(llm.tokenizer, config.thinking)

    def template(prompt: Prompt) -> dict[str, Any]:
        thinking = renderer.thinking_of(prompt.hash, 0)
        return {} if thinking is None else {"enable_thinking": thinking}

    fitting = [p for p in prompts if _fits(llm, p, config.max_tokens, template(p))]
    fitting = fitting or [replace(p, turns=p.turns[:1]) for p in prompts]  # which were answered, so they fit
    a_token = _seconds_a_token(llm, fitting[0])
    tokens = (seconds - (time.monotonic() - start)) / (ARMS * a_token)
    each = int(max(LEAST_TOKENS, min(MOST_TOKENS, config.max_tokens, tokens / LEAST_PROMPTS)))
    several = terminal.round_robin(fitting, int(max(LEAST_PROMPTS, min(MOST_PROMPTS, tokens / each))))
    params = SamplingParams(
        temperature=config.temperatures[0], top_p=config.top_p, top_k=config.top_k, seed=config.seed, max_tokens=each
    )
    names = terminal.pair_names(where.target, name, where.revision, None, where.lora)
    with err.status(f"{counted(len(several), 'prompt')} with and without the draft, up to {each} tokens each"):
        result = compare(llm, several, params, names=names, template=template)
    terminal.show_comparison(result)
    found = result.to_json()
    return {name: found[name] for name in ("setup", "all", "without_loops", "by_category")}


def _fits(llm: LLM, prompt: Prompt, longest: int, template: dict[str, Any]) -> bool:
    """Whether all turns of a conversation fit, answers included."""
    asked = [*prompt.opening, *({"role": "user", "content": turn} for turn in prompt.turns[:1])]
    rest = sum(len(llm.tokenizer(turn)["input_ids"]) + 16 for turn in prompt.turns[1:])
    return len(llm.render(asked, template)) + rest + longest * len(prompt.turns) <= llm.engine.max_model_len


def _seconds_a_token(llm: LLM, prompt: Prompt) -> float:
    """Of one answer with the draft, its prompt included, after one to warm up."""
    params = SamplingParams(temperature=0.0, max_tokens=LEAST_TOKENS, ignore_eos=True)
    for _ in range(2):
        start = time.monotonic()
        llm.chat([*prompt.opening, {"role": "user", "content": prompt.turns[0]}], params)
    return (time.monotonic() - start) / LEAST_TOKENS
