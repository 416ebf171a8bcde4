"""Answers become records: split at the generation boundary, turn by turn, seeded by prompt and sample, what is bad left out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from saved import saved_pair
from synthesizing import SHORT, THINKING_TEMPLATE, rows_of, some_prompts, tiny_llm

from flashdraft.engine.request import SamplingParams
from flashdraft.errors import ConfigError
from flashdraft.llm import LLM
from flashdraft.prompts import Prompt
from flashdraft.train.conversations import Renderer
from flashdraft.train.data import load_records
from flashdraft.train.identity import tokenizer_hash
from flashdraft.train.jobs import Answer, Job
from flashdraft.train.self_prompts import Seed, self_prompts
from flashdraft.train.sources import EngineSource, Lengths, RolloutSource, make_rollout
from flashdraft.train.synthesize import SynthesisConfig, count_token, synthesize, training_hashes


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("pair"))


class Saying(EngineSource):
    """A source whose answers are said by the test: `say(job)` gives tokens and finish."""

    def __init__(self, llm: LLM, say) -> None:  # type: ignore[no-untyped-def]
        super().__init__(llm)
        self.say, self.jobs = say, list[Job]()

    def run(self, jobs):  # type: ignore[no-untyped-def]
        while jobs:
            job = jobs.popleft()
            self.jobs.append(job)
            yield Answer(job, *self.say(job))


def test_records_are_the_answers_that_the_engine_gives_to_the_rendered_prompt(llm: LLM, tmp_path: Path) -> None:
    prompts = some_prompts(6)
    counts = synthesize(llm, prompts, tmp_path, replace(SHORT, temperatures=(0.0,)))
    rows = rows_of(tmp_path)
    assert len(rows) == counts["answers kept"] > 0
    assert counts["answers kept"] + sum(n for name, n in counts.items() if "dropped" in name) == 6
    for prompt in prompts:
        if row := rows.get((prompt.hash, 0, 0)):
            ids = llm.render([{"role": "user", "content": prompt.turns[0]}])
            (result,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=12))
            assert (row["prompt_ids"], row["output_ids"]) == (ids, result.outputs[0].token_ids)
            assert (row["category"], row["lang"]) == (prompt.category, "fr" if prompt.category == "fr/chat" else "en")
            assert row["finish"] == result.outputs[0].finish_reason


def test_records_load_for_training(llm: LLM, tmp_path: Path) -> None:
    counts = synthesize(llm, some_prompts(5), tmp_path, SHORT)
    records = load_records(tmp_path)
    assert (len(records), records.answer_tokens) == (counts["answers kept"], counts["answer tokens kept"])
    assert set(training_hashes(tmp_path).tolist()) <= {prompt.hash for prompt in some_prompts(5)}
    assert training_hashes(tmp_path).dtype == np.uint64


def test_an_answer_is_the_same_in_any_company_and_with_any_draft(llm: LLM, tmp_path: Path) -> None:
    prompts, config = some_prompts(8, turns=2), replace(SHORT, samples=2)
    synthesize(llm, prompts, tmp_path / "all", config)
    synthesize(llm.without_draft(), prompts[::-1], tmp_path / "plain", config)
    synthesize(llm, prompts[3:5], tmp_path / "two", config)
    everything = rows_of(tmp_path / "all")
    assert rows_of(tmp_path / "plain") == everything
    assert rows_of(tmp_path / "two").items() <= everything.items()
    samples = [[row["output_ids"] for key, row in everything.items() if key[1:] == (sample, 0)] for sample in (0, 1)]
    assert samples[0] != samples[1]


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.8}])
def test_a_rollout_gives_the_answers_of_the_engine(llm: LLM, tmp_path: Path, filters: dict[str, float]) -> None:
    config = replace(SHORT, greedy_share=0.5, **filters)  # type: ignore[arg-type]
    sampling = [SamplingParams(temperature=0.8, **filters)]  # type: ignore[arg-type]
    rollout = make_rollout(llm.target, llm.tokenizer, Lengths(200, 12), sampling, slots=3)
    synthesize(RolloutSource(rollout, llm.tokenizer), some_prompts(8, turns=2), tmp_path / "rollout", config)
    synthesize(llm, some_prompts(8, turns=2), tmp_path / "engine", config)
    assert rows_of(tmp_path / "rollout") == rows_of(tmp_path / "engine")


def test_self_prompts_begin_with_their_seed(llm: LLM) -> None:
    rollout = make_rollout(llm.target, llm.tokenizer, Lengths(100, 12), slots=4)
    counts: Counter[str] = Counter()
    source, seeds = RolloutSource(rollout, llm.tokenizer), [Seed("the lazy", "self/chat")]
    prompts = self_prompts(source, seeds, 40, seconds=60, counts=counts, lengths=(2, 12))
    assert counts["self prompts sampled"] == 40
    assert counts["self prompts kept"] == len(prompts) > 0
    assert all(prompt.turns[0].startswith("the lazy") and prompt.category == "self/chat" for prompt in prompts)


def test_another_seed_gives_other_answers(llm: LLM, tmp_path: Path) -> None:
    synthesize(llm, some_prompts(4), tmp_path / "0", SHORT)
    synthesize(llm, some_prompts(4), tmp_path / "1", replace(SHORT, seed=1))
    assert rows_of(tmp_path / "0") != rows_of(tmp_path / "1")


def test_the_next_turn_is_asked_after_the_target_s_own_answer(llm: LLM, tmp_path: Path) -> None:
    prompt = Prompt("two", "chat", ("the quick", "brown fox", "jumps"), system="lazy dog")
    said = llm.tokenizer("over there", add_special_tokens=False)["input_ids"]
    source = Saying(llm, lambda job: ([*said, 1], "stop") if len(job.messages) < 4 else (said, "length"))
    synthesize(source, [prompt], tmp_path, SHORT)
    texts = [llm.tokenizer.decode(job.prompt) for job in source.jobs]
    begin = "<|system|>lazy dog</s><|user|>the quick</s><|assistant|>"
    assert texts == [begin, f"{begin}over there</s><|user|>brown fox</s><|assistant|>"], "an answer cut short is the last"
    assert sorted(key[2] for key in rows_of(tmp_path)) == [0, 1]
    assert len({job.seed for job in source.jobs}) == 2


def test_repeating_looping_and_empty_answers_are_left_out_and_counted(llm: LLM, tmp_path: Path) -> None:
    answers = iter([([7, 8] * 20, "length"), (list(range(5, 40)), "loop"), ([1], "stop"), ([5, 6, 1], "stop")])
    counts = synthesize(Saying(llm, lambda job: next(answers)), some_prompts(4), tmp_path, SHORT)
    assert {name: n for name, n in counts.items() if name.startswith("answers")} == {
        "answers dropped: repetition": 2,
        "answers dropped: one token": 1,
        "answers kept": 1,
    }
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["repetition", "repetition", "one token"]
    assert lines[0]["tokens"] == 40


def test_answers_that_loop_are_cut_early_by_the_engine(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path / "pair", draft=False)
    for layer in llm.target.model.model.layers:  # a token then depends on the one before alone: greedy answers must loop
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    config = SynthesisConfig(max_tokens=280, max_prompt_tokens=40, temperatures=(0.0,))
    counts = synthesize(llm, some_prompts(3), tmp_path, config)
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert counts["answers dropped: repetition"] == len(lines) == 3
    assert {line["tokens"] for line in lines} == {192}


def test_prompts_longer_than_the_limit_are_counted_and_skipped(llm: LLM, tmp_path: Path) -> None:
    prompts = [*some_prompts(3), Prompt("long", "x", ("fox " * 200,))]
    counts = synthesize(llm, prompts, tmp_path, replace(SHORT, max_prompt_tokens=100))
    assert counts["prompts too long"] == 1
    assert all(key[0] != prompts[-1].hash for key in rows_of(tmp_path))


def test_a_prompt_that_the_template_refuses_is_counted_and_skipped(tmp_path: Path) -> None:
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    template = refusal + "{{ messages[0]['content'] }}"
    pair = saved_pair(tmp_path / "pair", chat_template=template)
    llm = LLM(pair.target, False, dtype="float32", device="cpu", max_model_len=128)
    prompts = [Prompt("a", "x", ("the quick",), system="be brief"), Prompt("b", "x", ("brown fox",))]
    counts = synthesize(llm, prompts, tmp_path / "out", SHORT)
    assert counts["prompts refused by the chat template"] == 1
    assert sum(n for name, n in counts.items() if name == "answers kept" or "dropped" in name) == 1


def test_temperatures_are_drawn_by_answer_and_one_sample_a_prompt_is_greedy() -> None:
    config = SynthesisConfig(samples=4, temperatures=(0.3, 0.6, 0.9), greedy_share=0.125)
    hashes = range(10**15, 10**15 + 2000)
    drawn = [[config.temperature_of(h, sample, 4) for sample in range(4)] for h in hashes]
    shares = Counter(t for row in drawn for t in row)
    assert shares[0.0] / 8000 == pytest.approx(0.125, abs=0.01)
    assert all(t != 0 for row in drawn for t in row[1:])
    assert [shares[t] / 8000 for t in config.temperatures] == pytest.approx([0.875 / 3] * 3, abs=0.02)


def test_samples_may_differ_by_category(llm: LLM, tmp_path: Path) -> None:
    counts = synthesize(llm, some_prompts(4), tmp_path, replace(SHORT, samples={"": 1, "code": 3}))
    made = Counter(key[0] for key in rows_of(tmp_path))
    assert sum(n for name, n in counts.items() if name == "answers kept" or "dropped" in name) == 2 * 1 + 2 * 3
    assert all(made[p.hash] <= (3 if p.category == "code" else 1) for p in some_prompts(4))


@pytest.mark.parametrize(("mode", "shares"), [("on", {True}), ("off", {False}), ("mixed", {True, False}), (None, {True})])
def test_thinking_is_switched_through_the_chat_template(tmp_path: Path, mode, shares: set[bool]) -> None:  # type: ignore[no-untyped-def]
    pair = saved_pair(tmp_path / "pair", chat_template=THINKING_TEMPLATE)
    llm = LLM(pair.target, False, dtype="float32", device="cpu", max_model_len=128)
    synthesize(llm, some_prompts(10), tmp_path / "out", replace(SHORT, thinking=mode))
    rows = rows_of(tmp_path / "out").values()
    assert {row["thinking"] for row in rows} == shares
    assert all(llm.tokenizer.decode(row["prompt_ids"]).endswith("<think></think>") != row["thinking"] for row in rows)


def test_a_template_without_the_switch_is_found_out(llm: LLM, tmp_path: Path) -> None:
    assert not Renderer(llm.tokenizer, "on").switches
    synthesize(llm, some_prompts(3), tmp_path, replace(SHORT, thinking="mixed"))
    assert {row["thinking"] for row in rows_of(tmp_path).values()} == {False}


def test_thinking_is_no_part_of_later_turns(llm: LLM) -> None:
    renderer = Renderer(llm.tokenizer)

    def ids(text: str) -> list[int]:
        return llm.tokenizer(text, add_special_tokens=False)["input_ids"]

    assert renderer.content(ids("<|assistant|>"), [*ids("<think>so\n</think>\n\nfox"), 1]) == "fox"
    assert renderer.content(ids("<|assistant|><think>\n"), [*ids("so</think>\n\nfox"), 1]) == "fox"
    assert renderer.content(ids("<|assistant|>"), [*ids(" fox"), 1]) == " fox"


def test_metadata_say_whose_answers_they_are(llm: LLM, tmp_path: Path) -> None:
    synthesize(llm, some_prompts(2), tmp_path, SHORT, target="owner/name", revision="v1")
    (path,) = tmp_path.glob("answers-*.parquet")
    inside = json.loads(pq.read_schema(path).metadata[b"flashdraft"])
    beside = json.loads((tmp_path / "synthesis.json").read_text())
    assert inside["tokenizer_hash"] == beside["tokenizer_hash"] == tokenizer_hash(llm.tokenizer)
    assert (inside["target"], inside["revision"]) == ("owner/name", "v1")
    assert inside["sampling"] == beside["sampling"]
    assert inside["sampling"]["temperatures"] == [0.8]
    assert beside["counts"]["answers kept"] == len(rows_of(tmp_path))


def test_records_that_hold_a_token_are_counted(llm: LLM, tmp_path: Path) -> None:
    answers = iter([([5, 6, 2, 2, 1], "stop"), ([5, 6, 1], "stop"), ([2, 6, 1], "stop")])
    synthesize(Saying(llm, lambda job: next(answers)), some_prompts(3), tmp_path, SHORT)
    assert count_token(tmp_path, 2) == 2
    assert count_token(tmp_path, 299) == 0


def test_no_turn_is_asked_when_the_time_is_up(llm: LLM, tmp_path: Path) -> None:
    counts = synthesize(llm, some_prompts(20, turns=2), tmp_path, SHORT, max_seconds=0.0)
    assert 0 < counts["answers kept"] < 15
    synthesize(llm, some_prompts(20, turns=2), tmp_path, SHORT)
    synthesize(llm, some_prompts(20, turns=2), tmp_path / "whole", SHORT)
    assert rows_of(tmp_path) == rows_of(tmp_path / "whole")


def test_of_thousands_of_samples_those_are_rendered_that_are_asked_for(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, rendered = Renderer.encode, list[int]()
    monkeypatch.setattr(Renderer, "encode", lambda self, texts: rendered.append(len(texts)) or encode(self, texts))
    source = Saying(llm, lambda job: ([5, 1], "stop"))
    synthesize(source, some_prompts(4), tmp_path, replace(SHORT, samples=5000), max_seconds=0)
    assert (len(source.jobs), rendered) == (1, [256])


def test_progress_counts_conversations_to_the_end(llm: LLM, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    synthesize(llm, some_prompts(9, turns=3), tmp_path, SHORT, report=lambda p: seen.append((p.done, p.total)))
    assert seen[0] == (0, 9)
    assert seen[-1] == (9, 9)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": ()}, "temperatures"),
        ({"temperatures": (3.0,)}, "from 0 to 2"),
        ({"top_p": 0.0}, "top_p"),
        ({"greedy_share": 1.5}, "share from 0 to 1"),
        ({"samples": 0}, "samples"),
        ({"samples": 2, "temperatures": (0.0,)}, "one and the same"),
        ({"max_tokens": 1}, "max_tokens must be at least 2"),
        ({"thinking": "maybe"}, "on, off or mixed"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SynthesisConfig(**settings)  # type: ignore[arg-type]
