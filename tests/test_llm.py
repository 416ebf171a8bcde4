"""LLM: text in, text out, whole or streamed, the same with a draft and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from saved import saved_pair
from transformers import AutoModelForCausalLM

import flashdraft
from flashdraft import LLM, SamplingParams
from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError, RequestError

QUESTION = [{"role": "user", "content": "tell me a tale"}]
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def llm(pair):
    return LLM(pair.target, pair.draft, dtype="float32", device="cpu", max_model_len=256, adaptive_width=False)


@pytest.fixture(scope="module")
def plain(llm):
    return llm.without_draft()


def test_generate_equals_transformers_greedy_generation(pair, llm, plain):
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    ids = llm.tokenizer("the quick brown fox")["input_ids"]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    params = SamplingParams(temperature=0, max_tokens=24, skip_special_tokens=False)
    for one in (llm, plain):
        [output] = one.generate("the quick brown fox", params)
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == ids
    assert llm.generate("the quick brown fox", params)[0].outputs[0].acceptance_length >= 1
    assert plain.generate("the quick brown fox", params)[0].outputs[0].acceptance_length is None


def test_prompts_may_be_texts_or_ids_alone_or_many(llm):
    ids = llm.tokenizer("hello")["input_ids"]
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = [o.text for o in llm.generate(["hello", ids], params)]
    assert texts[0] == texts[1] == llm.generate("hello", params)[0].text == llm.generate(ids, params)[0].text


def test_streamed_text_adds_up_to_the_whole_and_does_not_depend_on_the_draft(llm, plain):
    whole = llm.chat(QUESTION, SAMPLED)[0].outputs[0]
    for one in (llm, plain):
        deltas = list(one.chat(QUESTION, SAMPLED, stream=True))
        assert "".join(d.text for d in deltas) == whole.text
        assert [t for d in deltas for t in d.token_ids] == whole.token_ids
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == whole.finish_reason
        assert deltas[-1].completion.text == whole.text


def test_two_streams_in_turns_lose_nothing(llm):
    prompts = ("the quick", "a lazy dog and")
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 9)]
    whole = [llm.generate(prompt, p)[0].text for prompt, p in zip(prompts, params, strict=True)]
    streams = [llm.stream(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    texts, last = ["", ""], [None, None]
    for _ in range(200):
        for i, stream in enumerate(streams):
            delta = next(stream, None)
            if delta is not None:
                texts[i] += delta.text
                last[i] = delta
    assert texts == whole
    assert [d.finish_reason for d in last] == ["length", "length"]


def test_a_stream_that_is_never_read_runs_nothing(llm):
    streams = [llm.stream("once upon a time", SamplingParams(max_tokens=200)) for _ in range(3)]
    streams[0].close()
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="context holds"):
        llm.stream("word " * 400)


def test_an_error_is_raised_to_its_own_caller_only(llm):
    hopeless = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=tuple(range(len(llm.tokenizer))))
    stream = llm.stream("the quick", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    first = next(stream)
    with pytest.raises(FlashdraftError, match="no token to choose"):
        llm.generate("a lazy dog", hopeless)
    rest = list(stream)
    whole = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    assert first.text + "".join(d.text for d in rest) == whole.text
    llm.engine.check_idle()


@pytest.mark.parametrize("bad", ["\ud800", "fine \udcff"])
def test_text_that_is_no_unicode_is_refused(llm, bad):
    with pytest.raises(RequestError, match="not valid Unicode"):
        llm.generate(bad)
    with pytest.raises(RequestError, match="not valid Unicode"):
        llm.chat([{"role": "user", "content": bad}])


@pytest.mark.parametrize("messages", [[], {}, "hello", {"role": "user", "content": "x"}])
def test_what_is_no_list_of_messages_is_refused(llm, messages):
    with pytest.raises(RequestError, match="chat takes a list of messages"):
        llm.chat(messages)


@pytest.mark.parametrize("device", ["nonsense", "cuda:77", ""])
def test_a_device_that_is_not_there_is_refused(pair, device):
    with pytest.raises(ConfigError, match="cannot be used here"):
        LLM(pair.target, device=device)


def test_what_the_device_rules_out_is_refused_before_anything_is_read(pair):
    with pytest.raises(ConfigError, match="deterministic is an option of async_scheduling, which is off"):
        LLM(pair.target.parent / "nowhere", device="cpu", deterministic=True)
    with pytest.raises(ConfigError, match="kv_cache_share must be"):
        LLM(pair.target.parent / "nowhere", kv_cache_share=2)


def test_leaving_a_stream_early_frees_its_pages(llm):
    stream = llm.stream("once upon a time", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    llm.engine.check_idle()


def test_a_stop_string_cuts_the_text_with_and_without_the_draft(llm, plain):
    text = plain.generate("abc", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].text
    stop = text[10:12]
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=include)
        answers = [one.generate("abc", params)[0].outputs[0] for one in (llm, plain)]
        cut = text.index(stop)
        assert answers[0].text == answers[1].text == text[: cut + len(stop) * include]
        assert answers[0].token_ids == answers[1].token_ids
        assert (answers[0].finish_reason, answers[0].stop_reason) == ("stop", stop)


def test_n_answers_differ_and_equal_those_without_a_draft(llm, plain):
    params = SamplingParams(temperature=1.0, seed=8, n=3, max_tokens=16)
    texts = [[c.text for c in one.chat(QUESTION, params)[0].outputs] for one in (llm, plain)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_logprobs_come_with_every_token(llm):
    answer = llm.generate("abc", SamplingParams(temperature=0, max_tokens=10, logprobs=2, ignore_eos=True))[0].outputs[0]
    assert [entry.token for entry in answer.logprobs] == answer.token_ids
    for entry in answer.logprobs:
        assert len(entry.top) == 2
        assert entry.top[0] == (entry.token, entry.logprob)


def test_prompt_logprobs_come_once_a_prompt(llm, plain):
    params = SamplingParams(temperature=1.0, seed=8, n=3, max_tokens=8, prompt_logprobs=2)
    outputs = llm.generate(["abcabc", "x"], params)
    for output in outputs:
        assert output.prompt_logprobs[0] is None
        assert [entry.token for entry in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]
    without = llm.generate(["abcabc", "x"], replace(params, prompt_logprobs=None))
    assert [[c.text for c in o.outputs] for o in outputs] == [[c.text for c in o.outputs] for o in without]
    assert without[0].prompt_logprobs is None
    for entry, other in zip(
        outputs[0].prompt_logprobs[1:], plain.generate("abcabc", params)[0].prompt_logprobs[1:], strict=True
    ):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(entry.top) == 2
    with pytest.raises(RequestError, match="stream"):
        llm.stream("abc", params)


def test_the_second_turn_finds_the_first_in_the_prefix_cache(llm):
    first = llm.chat(QUESTION, SAMPLED)[0]
    later = [*QUESTION, {"role": "assistant", "content": first.text}, {"role": "user", "content": "go on"}]
    assert llm.chat(later, SAMPLED)[0].num_cached_tokens > 0


def test_a_thread_of_refusals_has_one_sentence_each(llm, pair, tmp_path):
    with pytest.raises(RequestError, match="context holds 256"):
        llm.generate("word " * 400)
    with pytest.raises(RequestError, match="one conversation at a time"):
        llm.chat([QUESTION, QUESTION], stream=True)
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[]])
    for token in (-1, 10**6, 2**80):
        with pytest.raises(RequestError, match="not an id of the target's vocabulary"):
            llm.generate([[token]])
    with pytest.raises(ConfigError, match="unknown option max_len"):
        LLM(pair.target, max_len=3)
    with pytest.raises(CheckpointError, match="no such directory"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="chat template refuses"):
        llm.chat([{"role": "user"}])
    llm.engine.check_idle()


def test_a_draft_of_another_target_is_refused(pair, tmp_path):
    other = saved_pair(tmp_path, hidden_size=32)
    with pytest.raises(ConfigError, match="hidden"):
        LLM(pair.target, other.draft, dtype="float32")


def test_a_target_without_a_chat_template_says_so(pair, tmp_path):
    bare = saved_pair(tmp_path, chat_template=None)
    llm = LLM(bare.target, dtype="float32", device="cpu", max_model_len=128)
    with pytest.raises(ConfigError, match="no chat template"):
        llm.chat(QUESTION)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": float("nan")},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -5},
        {"min_p": 2},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 3},
        {"n": 0},
        {"seed": 2**70},
        {"stop": [""]},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"logit_bias": [1]},
        {"logit_bias": {3: float("inf")}},
        {"logprobs": 99},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
    ],
)
def test_sampling_values_out_of_range_are_refused(bad):
    with pytest.raises(RequestError, match=next(iter(bad)).removesuffix("s")):
        SamplingParams(**bad)


def test_public_names_are_the_documented_ones():
    assert flashdraft.LLM is LLM


def test_a_saved_drafts_files_have_the_same_permissions(pair):
    modes = {path.name: path.stat().st_mode & 0o777 for path in pair.draft.iterdir()}
    assert len(set(modes.values())) == 1, modes
