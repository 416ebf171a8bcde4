"""Tokens/s of synthesis: ours by a rollout, by the engine with and without a draft, and transformers' batched generate.

    python benchmarks/synthesize.py [--target NAME --draft NAME] [--prompts FILES] [--count 2048] [--max-tokens 512]
        [--arms rollout engine draft transformers] [--slots 3072] [--seqs 64 256] [--batch 256]

The same prompts in every arm, temperature 0.7, answers of their own lengths; tokens counted are those generated, also of
answers that the repetition filter leaves out. Every arm runs once over a few prompts first, so that nothing is compiled while
it is timed. transformers answers batch by batch, padded on the left and sorted by length, which is its best case.
"""

from __future__ import annotations

import argparse
import copy
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from versus_transformers import gguf_arguments

from flashdraft import builtin
from flashdraft.engine.request import SamplingParams
from flashdraft.prompts import Prompt
from flashdraft.targets import load_tokenizer
from flashdraft.targets.quiet import quiet
from flashdraft.train.conversations import Renderer
from flashdraft.train.corpus import Corpus
from flashdraft.train.jobs import Source
from flashdraft.train.sources import Lengths, load_source
from flashdraft.train.synthesize import Progress, SynthesisConfig, synthesize

TEMPERATURE = 0.7
# On a CPU a rollout's attention is the plain reference of its kernel: for tests, not for speed.
ARMS = [*(["rollout"] if torch.cuda.is_available() else []), "engine", "draft", "transformers"]
WARM_UP = 32  # prompts, of 16 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="without it the built-in one")
    parser.add_argument("--draft", help="for the arm `draft`; without it the built-in target's")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[builtin.PROMPTS])
    parser.add_argument("--count", type=int, default=2048, help="prompts; fewer are repeated with a number behind them")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-prompt-tokens", type=int, default=512)
    parser.add_argument("--arms", nargs="*", default=ARMS)
    parser.add_argument("--slots", type=int, help="of the rollout")
    parser.add_argument("--seqs", type=int, nargs="*", default=[64, 256], help="sequences of the engine")
    parser.add_argument("--batch", type=int, default=256, help="of transformers")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    prompts = enough(args)
    for name, run in arms(args):
        tokens, seconds = run(prompts)
        print(f"{name:28} {tokens:10,} tokens {seconds:8.1f} s {tokens / seconds:12,.0f} tokens/s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    print(f"{len(prompts):,} prompts; {device}; torch {torch.__version__}; transformers {transformers.__version__}")


def enough(args: argparse.Namespace) -> list[Prompt]:
    """As many different prompts as asked for, each of one turn."""
    found = [prompt for chunk in Corpus.of_files(args.prompts).chunks() for prompt in chunk]
    made = []
    for number in range(args.count):
        prompt, again = found[number % len(found)], number // len(found)
        made.append(Prompt(f"{number}", prompt.category, (prompt.turns[0] + (f" ({again})" if again else ""),)))
    return made


Run = Callable[[Sequence[Prompt]], tuple[int, float]]


def arms(args: argparse.Namespace) -> list[tuple[str, Run]]:
    lengths = Lengths(args.max_prompt_tokens, args.max_tokens)
    sampling = [SamplingParams(temperature=TEMPERATURE)]
    found: list[tuple[str, Run]] = []

    def ours(**options: object) -> Run:
        def run(prompts: Sequence[Prompt]) -> tuple[int, float]:
            source = load_source(args.target, lengths, sampling=sampling, dtype=args.dtype, **options)  # type: ignore[arg-type]
            answer(source, prompts[:WARM_UP], args, 16)
            return answer(source, prompts, args, args.max_tokens)

        return run

    if "rollout" in args.arms:
        found.append(("rollout", ours(generator="rollout", max_num_seqs=args.slots)))
    for seqs in args.seqs:
        if "engine" in args.arms:
            found.append((f"engine, {seqs} at once", ours(generator="engine", max_num_seqs=seqs)))
        if "draft" in args.arms:
            found.append(
                (
                    f"engine and draft, {seqs} at once",
                    ours(generator="engine", draft=args.draft or builtin.NAME, max_num_seqs=seqs),
                )
            )
    if "transformers" in args.arms:
        found.append((f"transformers, batch {args.batch}", lambda prompts: theirs(prompts, args)))
    return found


def answer(source: Source, prompts: Sequence[Prompt], args: argparse.Namespace, max_tokens: int) -> tuple[int, float]:
    """Tokens and seconds of the whole command but for loading: rendering, filters and files are in it."""
    config = SynthesisConfig(temperatures=(TEMPERATURE,), max_tokens=max_tokens, max_prompt_tokens=args.max_prompt_tokens)
    last = Progress(0, 0)

    def report(progress: Progress) -> None:
        last.tokens = progress.tokens

    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        synthesize(source, prompts, folder, config, report=report)
        return last.tokens, time.perf_counter() - begun


def theirs(prompts: Sequence[Prompt], args: argparse.Namespace) -> tuple[int, float]:
    where = gguf_arguments() if args.target is None else {"pretrained_model_name_or_path": args.target}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=args.dtype).eval().to(device)
    tokenizer = load_tokenizer(builtin.target_path() if args.target is None else args.target)
    renderer = Renderer(tokenizer)
    ids = renderer.encode([renderer.render([{"role": "user", "content": p.turns[0]}], {}) for p in prompts])
    ids = sorted((one for one in ids if len(one) <= args.max_prompt_tokens), key=len)
    batches = [ids[start : start + args.batch] for start in range(0, len(ids), args.batch)]
    generate(model, tokenizer, batches[0], 16)
    begun = time.perf_counter()
    tokens = sum(generate(model, tokenizer, batch, args.max_tokens) for batch in batches)
    return tokens, time.perf_counter() - begun


@torch.inference_mode()
def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[list[int]], max_tokens: int) -> int:
    """Tokens that a batch's answers have, up to and with their end-of-text token."""
    longest, pad = max(map(len, batch)), tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(one)) + one for one in batch], device=model.device)
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in batch], device=model.device)
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=max_tokens, pad_token_id=pad)
    out = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:]
    ends = (out == pad).int()
    return int((ends.cumsum(1) - ends == 0).sum())


if __name__ == "__main__":
    main()
