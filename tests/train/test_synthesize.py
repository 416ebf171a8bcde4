from __future__ import annotations

import json
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from flashdraft.errors import FlashdraftError
from flashdraft.prompts import Prompt, prompt_hash, read_prompts, repetition
from flashdraft.targets.target import Target
from flashdraft.train.data import load_records, read_column
from flashdraft.train.rollout import Answer, Job, Rollout
from flashdraft.train.synthesize import (
    Exclusions,
    Seed,
    SynthesisConfig,
    Synthesizer,
    select_prompts,
    training_hashes,
)

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<unk>", "<end>", "<user>", "<assistant>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(60))])}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def synthesizer(target: Target, tokenizer: PreTrainedTokenizerFast, directory: Path, **config: object) -> Synthesizer:
    rollout = Rollout(target, frozenset({1}), slots=4, max_len=48, max_new=12, prefill_shape=(2, 32), check_every=4)
    settings = SynthesisConfig(**{"max_new": 12, "max_prompt": 24, **config})  # type: ignore[arg-type]
    return Synthesizer(rollout, tokenizer, settings, Exclusions(), directory)


PROMPTS = [Prompt(f"p/{i}", "code" if i % 2 else "fr/chat", (f"w{i} w{i + 1} w{i + 2}",)) for i in range(6)]


def test_prompt_hash_ignores_case_and_white_space() -> None:
    assert prompt_hash("Write  a\nPoem ") == prompt_hash("write a poem") != prompt_hash("write a poem.")
    assert prompt_hash("write a poem") == 9926215631658692565


def test_duplicates_and_excluded_prompts_are_dropped_and_counted() -> None:
    copy = " ".join(f"word{i}" for i in range(13))
    exclusions = Exclusions([Prompt("e", "x", ("What is 2 + 2?",)), Prompt("e", "x", ("short", copy))])
    texts = ["Fine", "fine ", "what is 2 +  2?", f"before {copy} after", "Also fine"]
    counts: Counter[str] = Counter()
    kept = select_prompts([Prompt(str(i), "x", (text,)) for i, text in enumerate(texts)], exclusions, counts)
    assert [prompt.id for prompt in kept] == ["0", "4"]
    assert counts == {"prompts duplicate": 1, "prompts excluded": 2}


def test_the_wording_of_a_template_excludes_nothing() -> None:
    template = " ".join(f"please{i}" for i in range(13))
    exclusions = Exclusions([Prompt(str(i), "x", (f"{template} number {i}",)) for i in range(3)])
    assert f"{template} number 2" in exclusions
    assert f"{template} something else" not in exclusions


def test_repetition_counts_repeated_8_grams() -> None:
    assert repetition(range(100)) == 0.0
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([1, 2, 3, 4] * 10) == pytest.approx(1 - 4 / 33)


def test_a_prompt_file_with_a_bad_row_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": 1, "category": "a", "turns": ["x\u2028y"]}, ensure_ascii=False) + '\n{"id": 2}\n')
    with pytest.raises(FlashdraftError, match="line 2"):
        read_prompts(path)


def test_answers_become_records_split_at_the_generation_boundary(
    tiny_target: Target, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = synthesizer(tiny_target, tokenizer, tmp_path, samples={"": 2, "code": 3}, greedy_share=0.5)
    made.answer(PROMPTS, seconds=60)
    records = load_records(tmp_path)
    assert (
        len(records) + made.counts["answers dropped: repetition"] + made.counts["answers dropped: one token"] == 3 * 2 + 3 * 3
    )
    for i in range(len(records)):
        prompt = records.record(i)[: records.prompt_lengths[i]].tolist()
        assert (prompt[0], prompt[-2:]) == (2, [1, 3])
    assert set(read_column(tmp_path, "lang")) == {"fr", "en"}
    assert 0.0 in read_column(tmp_path, "temperature")
    assert all(t == 0.0 or 0.3 <= round(t, 6) <= 1.0 for t in read_column(tmp_path, "temperature"))
    assert training_hashes(tmp_path).tolist() == sorted({prompt.hash for prompt in PROMPTS})
    assert training_hashes(tmp_path).dtype == np.uint64


def test_a_second_run_skips_prompts_that_have_answers(
    tiny_target: Target, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    synthesizer(tiny_target, tokenizer, tmp_path).answer(PROMPTS[:3], seconds=60)
    before = len(load_records(tmp_path))
    again = synthesizer(tiny_target, tokenizer, tmp_path)
    again.answer(PROMPTS, seconds=60)
    assert sum(again.counts[f"answers {finish}"] for finish in ("stop", "length", "loop")) == 3 + (3 - before)


def test_repeating_and_looping_answers_are_dropped_and_counted(
    tiny_target: Target, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = synthesizer(tiny_target, tokenizer, tmp_path)
    job = Job([2, 5, 1, 3], tag=(PROMPTS[0], ()))
    for tokens, finish in (([7, 8] * 20, "length"), (list(range(5, 40)), "loop"), ([1], "stop"), ([5, 6, 1], "stop")):
        made._take(Answer(job, tokens, finish), deque())  # type: ignore[arg-type]
    assert made.counts["answers dropped: repetition"] == 2
    assert made.counts["answers dropped: one token"] == 1
    assert made.counts["answers kept"] == 1


def test_the_next_turn_is_asked_after_the_answer(
    tiny_target: Target, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = synthesizer(tiny_target, tokenizer, tmp_path)
    prompt = Prompt("two", "chat", ("w1 w2", "w3"))
    jobs: deque[Job] = deque()
    made._take(Answer(Job([0], 0.5, tag=(prompt, ())), [9, 10, 1], "stop"), jobs)
    (job,) = jobs
    assert tokenizer.decode(job.prompt) == "<user> w1 w2 <end> <assistant> w5 w6 <end> <user> w3 <end> <assistant>"
    assert job.temperature == 0.5
    made._take(Answer(job, [9, 10, 1], "stop"), deque())
    assert made.counts["answers kept"] == 2


def test_self_prompts_begin_with_their_seed(tiny_target: Target, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    made = synthesizer(tiny_target, tokenizer, tmp_path, self_prompt_tokens=(2, 12))
    prompts = made.self_prompts([Seed("w7 w8", "self/chat")], 60, seconds=60)
    assert made.counts["self prompts sampled"] == 60
    assert prompts
    assert all(prompt.turns[0].startswith("w7 w8 ") for prompt in prompts)
