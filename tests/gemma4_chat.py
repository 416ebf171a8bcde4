"""A tiny pair whose tokenizer has Gemma 4's markers and whose chat template is of its format."""

from __future__ import annotations

import json
from pathlib import Path

from saved import Pair, saved_pair
from transformers import AutoTokenizer

TEMPLATE = (Path(__file__).parent / "fixtures" / "gemma4" / "chat_template.jinja").read_text(encoding="utf-8")
MARKERS = (
    *("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", '<|"|>', "<|image|>", "<|audio|>"),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
)


def gemma4_pair(folder: Path, special: bool = True) -> Pair:
    """As its published files are: every marker is a token (`special`: a special one), and an answer ends with its turn, or
    where the result of a tool would begin.
    """
    pair = saved_pair(folder, chat_template=TEMPLATE, added=MARKERS, positions=2048)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    tokenizer.bos_token = "<s>"
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    tokenizer.save_pretrained(pair.target)
    ends = [1, *tokenizer.convert_tokens_to_ids(["<turn|>", "<|tool_response>"])]
    for name in ("config.json", "generation_config.json"):
        content = json.loads((pair.target / name).read_text())
        (pair.target / name).write_text(json.dumps({**content, "eos_token_id": ends}))
    return pair
