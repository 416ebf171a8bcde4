"""Our engine without a draft against transformers' generate: the same weights, dtype, prompts and greedy decoding, in turns.

    python benchmarks/versus_transformers.py [--prompts 6] [--max-tokens 96] [--dtype bfloat16]

Prints tokens/s of both for every prompt, their ratio over all, and the machine.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from flashdraft import LLM, SamplingParams, builtin
from flashdraft.compare import setup
from flashdraft.prompts import read_prompts
from flashdraft.targets.load import DTYPES
from flashdraft.terminal import round_robin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", choices=[*DTYPES], default="bfloat16")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    ours = LLM(draft=False, dtype=arguments.dtype, max_model_len=2048, enable_prefix_caching=False)
    theirs = transformers_twin(ours, DTYPES[arguments.dtype])
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)
    totals = [0.0, 0.0]
    for number, prompt in enumerate(round_robin(read_prompts(builtin.PROMPTS), arguments.prompts)):
        ids = ours.render([{"role": "user", "content": prompt.turns[0]}])
        runs = [lambda ids=ids: ours.generate(ids, params), lambda ids=ids: generate(theirs, ids, arguments.max_tokens)]
        order = (0, 1) if number % 2 else (1, 0)
        if number == 0:
            for run in runs:
                run()
        seconds = [0.0, 0.0]
        for which in order:
            start = time.perf_counter()
            runs[which]()
            seconds[which] = time.perf_counter() - start
            totals[which] += seconds[which]
        rates = [arguments.max_tokens / s for s in seconds]
        print(
            f"{prompt.id:18} flashdraft {rates[0]:6.1f}  transformers {rates[1]:6.1f} tokens/s  ratio {rates[0] / rates[1]:.2f}"
        )
    print(f"all: flashdraft takes {totals[0]:.1f} s, transformers {totals[1]:.1f} s, ratio {totals[1] / totals[0]:.2f}")
    print(setup(ours))


def transformers_twin(llm: LLM, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in a model of transformers' own, with its default attention."""
    model = AutoModelForCausalLM.from_pretrained(**gguf_arguments(), dtype=dtype)
    return model.eval().to(llm.target.device)


def gguf_arguments() -> dict[str, object]:
    path = builtin.target_path()
    config = getattr(transformers, "GgufConfig", None)
    found: dict[str, object] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {**found, "quantization_config": config(dequantize=True)} if config else found


@torch.inference_mode()
def generate(model: PreTrainedModel, ids: list[int], tokens: int) -> None:
    prompt = torch.tensor([ids], device=model.device)
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )


if __name__ == "__main__":
    main()
