"""Images and audio sent to the server: the OpenAI client's answers are LLM's, media are accounted for, bad ones refused."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from media_saved import MARKS, data_url, encoded, saved_media_target, wav
from multimodal import picture, sound
from scripted import serving

from flashdraft.llm import LLM, SamplingParams
from flashdraft.media import MediaLimits

PNG, CLIP = encoded(picture(1)), wav(sound(1))
IMAGE = {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "high"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": base64.b64encode(CLIP).decode(), "format": "wav"}}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def asked(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


def load(folder):
    return LLM(folder, dtype="float32", device="cpu", max_model_len=512, max_num_batched_tokens=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_media_target(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def media_llm(folder):
    return load(folder)


@pytest.fixture(scope="module", params=["thread", "process"])
def sees(media_llm, folder, request):
    own = partial(load, folder) if request.param == "process" else lambda: LLM.from_parts(media_llm.tokenizer, media_llm.engine)
    limits = MediaLimits(images=2, clips=1)
    with serving(own, media_limits=limits, engine_process=request.param == "process") as client:
        yield client
        client.wait_idle()


def test_an_image_and_audio_through_the_openai_client(sees, media_llm):
    messages = asked("see ", IMAGE, " hear ", AUDIO, "?")
    [expected] = media_llm.chat(messages, GREEDY)
    options = dict(model="tiny", messages=messages, temperature=0, max_tokens=8)
    whole = sees.openai.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected.text
    usage, ids = whole.usage, expected.prompt_token_ids
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(expected.outputs[0].token_ids))
    image, audio = (media_llm.tokenizer.convert_tokens_to_ids(MARKS[i]) for i in (1, 3))
    counts = {"image_tokens": ids.count(image), "audio_tokens": ids.count(audio)}
    details = usage.prompt_tokens_details.model_dump()
    assert {name: details[name] for name in counts} == counts == {"image_tokens": 63, "audio_tokens": 13}
    again = sees.openai.chat.completions.create(**options).usage
    assert again.prompt_tokens_details.cached_tokens >= again.prompt_tokens - 16
    chunks = list(sees.openai.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text


def test_text_has_no_media_in_its_usage_and_may_come_in_parts(sees, media_llm):
    answer = sees.chat(messages=asked("the quick", "brown"), max_tokens=4)
    assert answer["usage"]["prompt_tokens_details"].keys() == {"cached_tokens"}
    [expected] = media_llm.chat([{"role": "user", "content": "the quick\nbrown"}], GREEDY)
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_images_by_the_other_two_apis(sees, media_llm):
    text = media_llm.chat(asked("look ", IMAGE), GREEDY)[0].text
    content = [{"type": "input_text", "text": "look "}, {"type": "input_image", "image_url": data_url(PNG)}]
    body = {"input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": 8}
    answer = sees.post("/v1/responses", body)
    assert "".join(part["text"] for item in answer["output"] for part in item["content"]) == text
    assert answer["usage"]["input_tokens_details"]["image_tokens"] == 63
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    content = [{"type": "text", "text": "look "}, {"type": "image", "source": source}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    assert "".join(part["text"] for part in sees.post("/v1/messages", body)["content"]) == text


def test_images_in_results_of_tools(sees, media_llm):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asks = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen: "}, IMAGE]}
    text = media_llm.chat([*asks, result], GREEDY)[0].text
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    shown = [{"type": "text", "text": "seen: "}, {"type": "image", "source": source}]
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": shown}]},
    ]
    answer = sees.post("/v1/messages", {"messages": turns, "temperature": 0, "max_tokens": 8})
    assert "".join(part["text"] for part in answer["content"]) == text
    shown = [{"type": "input_text", "text": "seen: "}, {"type": "input_image", "image_url": data_url(PNG)}]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": shown},
    ]
    answer = sees.post("/v1/responses", {"input": items, "temperature": 0, "max_output_tokens": 8})
    assert "".join(part["text"] for item in answer["output"] for part in item["content"]) == text


def test_tokens_of_media_are_counted_by_tokenize(sees, media_llm):
    found = sees.post("/tokenize", {"messages": asked("look ", IMAGE)})
    assert found["tokens"] == media_llm.prompt(asked("look ", IMAGE)).ids


BAD = {
    "remote": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "remote addresses are not fetched"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}, "is no data URL"),
    "truncated": ({"type": "image_url", "image_url": {"url": data_url(PNG[:-800])}}, "this image cannot be read"),
    "no image": ({"type": "image_url"}, "holds no data"),
    "an hour": (
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(np.zeros(3600 * 1000), 1000, 1)).decode()}},
        "this audio is 3,600.0 seconds long",
    ),
    "video": ({"type": "video_url", "video_url": {"url": "data:"}}, "a part of type video_url is not served"),
    "a placeholder": ({"type": "text", "text": MARKS[1]}, "stands for an image or audio, where there is none"),
    "no part": ({"type": "picture"}, "messages.0.content.1 must be a part such as"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_media_are_refused_with_400(sees, name):
    part, said = BAD[name]
    assert said in sees.error("/v1/chat/completions", {"messages": asked("see", part)})
    sees.wait_idle()


def test_a_bad_part_beside_an_image_is_named_by_its_place(sees):
    said = sees.error("/v1/chat/completions", {"messages": asked(IMAGE, {"type": "picture"})})
    assert "messages.0.content.1 must be a part such as" in said


@pytest.mark.parametrize("sees", ["thread"], indirect=True)
def test_text_does_not_wait_for_images(sees, media_llm, monkeypatch):
    encoder, begun, go = media_llm.target.media, threading.Event(), threading.Event()
    encode = encoder.encode

    def slow(kind, content):
        begun.set()
        assert go.wait(20)
        return encode(kind, content)

    monkeypatch.setattr(encoder, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sees.chat, messages=asked("see ", IMAGE), max_tokens=2)
        assert begun.wait(20)
        assert sees.complete(prompt="the quick", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert not answer.done()
        go.set()
        assert answer.result()["usage"]["prompt_tokens_details"]["image_tokens"] == 63


def test_counts_are_limited_by_option(sees):
    assert "may hold 2 images" in sees.error("/v1/chat/completions", {"messages": asked(IMAGE, IMAGE, IMAGE)})
    assert "may hold 1 audio clip, and" in sees.error("/v1/chat/completions", {"messages": asked(AUDIO, AUDIO)})


def test_prompts_with_media_have_no_logprobs_and_text_beside_them_has(sees):
    body = {"messages": asked("see ", IMAGE), "max_tokens": 2}
    assert "for text alone" in sees.error("/v1/chat/completions", {**body, "prompt_logprobs": 1})
    told = sees.chat(messages=asked("the quick"), max_tokens=2, prompt_logprobs=1)
    assert len(told["prompt_logprobs"]) == told["usage"]["prompt_tokens"]


def test_a_placeholder_beside_an_image_is_refused(sees):
    assert "leave out the placeholder tokens" in sees.error("/v1/chat/completions", {"messages": asked(MARKS[1], IMAGE)})


def test_a_text_only_target_names_the_part(served):
    for part in (IMAGE, AUDIO):
        said = served.error("/v1/chat/completions", {"messages": asked("see", part)})
        assert f"this target takes text only, and this is a part of type {part['type']}" in said
