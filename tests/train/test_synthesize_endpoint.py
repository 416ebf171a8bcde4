"""Answers by a server: with its token ids where it gives them, else tokenized here; what cannot be trusted is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import completion, serving
from synthesizing import SHORT, rows_of, some_prompts, tiny_llm
from transformers import PreTrainedTokenizerBase

from flashdraft.client import Client, ServerError
from flashdraft.engine.request import SamplingParams
from flashdraft.errors import ConfigError
from flashdraft.llm import LLM
from flashdraft.train import endpoint
from flashdraft.train.endpoint import EndpointSource
from flashdraft.train.synthesize import synthesize

PROMPTS = some_prompts(8, turns=2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("pair"), draft=False)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> PreTrainedTokenizerBase:
    return llm.tokenizer


def source(url: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> EndpointSource:
    return EndpointSource([Client(url, retries=1, pause=0.01)], tokenizer, **{"concurrency": 3, **options})


def as_vllm(llm: LLM) -> Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]:
    """What a vLLM server of this target answers, one request at a time."""
    lock = threading.Lock()

    def say(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with lock:
            params = SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"], seed=body["seed"])
            (result,) = llm.chat(body["messages"], params)
        answer = result.outputs[0]
        reply = completion(answer.text, str(answer.finish_reason))
        if body.get("return_token_ids"):
            reply["choices"][0]["token_ids"] = answer.token_ids
            reply["prompt_token_ids"] = result.prompt_token_ids
        return 200, reply

    return say


def test_with_a_server_s_ids_the_records_are_those_of_the_engine(llm: LLM, tmp_path: Path) -> None:
    with serving(as_vllm(llm)) as server:
        counts = synthesize(source(server.url, llm.tokenizer), PROMPTS, tmp_path / "served", SHORT)
    synthesize(llm, PROMPTS, tmp_path / "own", SHORT)
    assert rows_of(tmp_path / "served") == rows_of(tmp_path / "own")
    assert counts["answers kept"] >= 5
    assert {body["model"] for body in server.bodies} == {"target"}


def text_server(answers: Iterator[Any]) -> Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]:
    def say(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "return_token_ids" in body:
            return 400, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}
        return next(answers)

    return say


def test_without_ids_prompt_and_answer_are_tokenized_each_by_itself(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    answers = iter([(200, completion(" brown fox", "length")), (200, completion("the dog"))])
    with serving(text_server(answers)) as server:
        synthesize(source(server.url, tokenizer, concurrency=1), some_prompts(2), tmp_path, replace(SHORT, temperatures=(0.0,)))
    rows = sorted(rows_of(tmp_path).values(), key=lambda row: row["finish"])
    assert [tokenizer.decode(row["output_ids"]) for row in rows] == [" brown fox", "the dog</s>"]
    assert all(tokenizer.decode(row["prompt_ids"]).endswith("</s><|assistant|>") for row in rows)
    assert sum("return_token_ids" in body for body in server.bodies) == 1, "it is asked for ids once"


def test_only_what_is_set_is_sent(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with serving(text_server(iter([(200, completion("the dog"))] * 2))) as server:
        synthesize(source(server.url, tokenizer), some_prompts(1), tmp_path / "0", SHORT)
        synthesize(source(server.url, tokenizer), some_prompts(1), tmp_path / "1", replace(SHORT, top_k=20, top_p=0.9))
    plain, filtered = (body for body in server.bodies if "return_token_ids" not in body)
    assert set(plain) == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}
    assert (filtered["top_k"], filtered["top_p"]) == (20, 0.9)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((200, completion("the dog", message={"reasoning_content": "so"})), "thinking without its token ids"),
        ((200, completion("the dog", token_ids=[5, 6, 1])), "text and tokens differ"),
        ((200, completion("the dog", token_ids=[5, 10**6, 1])), "text and tokens differ"),
        ((200, completion("the dog", "content_filter")), "ended by the server with content_filter"),
        ((200, completion("the dog", "\x1b[2J odd")), "ended by the server with an unknown reason"),
        ((200, completion("the dog", token_ids=[5, -1])), "text and tokens differ"),
        ((200, completion("the dog", token_ids=[5, 2**70])), "text and tokens differ"),
        ((200, completion("the dog", token_ids=5)), "no chat completion"),
        ((200, completion("the dog", message={"content": [3]})), "no chat completion"),
        ((200, {"choices": []}), "no chat completion"),
        ((200, completion("", message={"content": None})), "empty"),
        ((200, completion("", "length", token_ids=[])), "empty"),
        ((200, completion("", token_ids=[1])), "one token"),
        ((400, {"error": {"message": "the prompt is too long"}}), "refused by the server"),
    ],
)
def test_an_answer_that_cannot_be_used_is_counted_and_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, reply: tuple[int, dict[str, Any]], reason: str
) -> None:
    answers = iter([(200, completion("the quick fox")), reply, (200, completion("the dog"))])
    with serving(lambda body: next(answers)) as server:
        counts = synthesize(source(server.url, tokenizer, concurrency=1), some_prompts(3), tmp_path, SHORT)
    assert (counts["answers kept"], counts[f"answers dropped: {reason}"]) == (2, 1)


def test_the_name_of_a_special_token_in_a_text_is_not_that_token(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    text = "the dog</s><mask> fox"
    with serving(text_server(iter([(200, completion(text))]))) as server:
        synthesize(source(server.url, tokenizer), some_prompts(1), tmp_path, SHORT)
    ((ids,),) = ([row["output_ids"]] for row in rows_of(tmp_path).values())
    assert tokenizer.decode(ids) == text + "</s>"
    assert [token for token in ids if token in tokenizer.all_special_ids] == [tokenizer.eos_token_id]


def test_a_tokenizer_that_cannot_write_the_text_is_noticed(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    class Lossy:
        """Spaces are lost in decoding, as with some SentencePiece tokenizers at the start of a text."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer(*args, **kwargs)

        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return str(tokenizer.decode(ids, **kwargs)).lstrip()

    answers = iter([(200, completion("the quick")), (200, completion(" fox"))])
    with serving(text_server(answers)) as server:
        lossy = source(server.url, Lossy(), concurrency=1)  # type: ignore[arg-type]
        counts = synthesize(lossy, some_prompts(2), tmp_path, SHORT)
    assert (counts["answers kept"], counts["answers dropped: text and tokens differ"]) == (1, 1)


def test_a_server_of_another_model_is_found_out_and_costs_no_prompt(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE", 5)
    refusal, pattern = {"error": {"message": "no such model"}}, r"none of the first 5 answers.*no such model.*is the target"
    with serving(lambda body: (400, refusal)) as server, pytest.raises(ConfigError, match=pattern):
        synthesize(source(server.url, tokenizer), some_prompts(9), tmp_path, SHORT)
    assert (tmp_path / "dropped.jsonl").read_bytes() == b""
    with serving(lambda body: (200, completion("the dog"))) as server:
        assert synthesize(source(server.url, tokenizer), some_prompts(9), tmp_path, SHORT)["answers kept"] == 9


@pytest.mark.parametrize(("reply", "reason"), [({"choices": None}, "no chat completion"), (completion(""), "empty")])
def test_a_server_that_says_nothing_costs_no_prompt(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, reply: dict[str, Any], reason: str
) -> None:
    pattern = rf"none of the first 3 answers.*{reason}"
    with serving(lambda body: (200, reply)) as server, pytest.raises(ConfigError, match=pattern):
        synthesize(source(server.url, tokenizer), some_prompts(3), tmp_path, SHORT)
    with serving(lambda body: (200, completion("the dog"))) as server:
        assert synthesize(source(server.url, tokenizer), some_prompts(3), tmp_path, SHORT)["answers kept"] == 3


def test_a_server_that_goes_away_loses_nothing(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    good = iter([(200, completion("the dog"))] * 4)
    with serving(lambda body: next(good, (503, {}))) as server, pytest.raises(ServerError, match="503"):
        synthesize(source(server.url, tokenizer, concurrency=1), some_prompts(9), tmp_path, SHORT)
    assert len(rows_of(tmp_path)) == 4
    with serving(lambda body: (200, completion("the dog"))) as server:
        synthesize(source(server.url, tokenizer), some_prompts(9), tmp_path, SHORT)
    assert len(rows_of(tmp_path)) == 9
    assert len(server.bodies) == 5


@pytest.mark.parametrize(("models", "message"), [((), "0 models"), (("a", "b"), r"2 models \(a, b\)")])
def test_a_server_of_several_models_must_be_told_which(
    tokenizer: PreTrainedTokenizerBase, models: tuple[str, ...], message: str
) -> None:
    with serving(lambda body: (200, {}), models=models) as server:
        with pytest.raises(ConfigError, match=message):
            source(server.url, tokenizer)
        assert source(server.url, tokenizer, model="b").model == "b"
