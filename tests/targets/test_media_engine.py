"""Images and audio through the engine: prompts cut in chunks, over pages, with a draft, by both runners (float32)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from media_prompts import MediaPrompt, text
from multimodal import EOI, IMAGE, media_model, media_target, picture, sound
from pairs import run, small_engine, tiny_draft

from flashdraft.draft import propose_offline
from flashdraft.engine.request import Request, SamplingParams
from flashdraft.errors import RequestError

MIXES = {
    "images": lambda: [text(1, 5), picture(1), picture(2, 70, 20), text(2, 7), picture(3, 20, 20), text(3, 3)],
    "audio": lambda: [text(1, 9), sound(1), text(2, 20)],
    "mix": lambda: [text(1, 30), sound(1, 0.3), text(4, 2), picture(1), text(2, 11), sound(2, 0.71), picture(4), text(3, 5)],
}
LIMITS = dict(max_model_len=512, kv_cache_memory_bytes=16 << 20)


@pytest.fixture(scope="module", params=[False, True], ids=["causal", "bidirectional"])
def bidirectional(request):
    return request.param


@pytest.fixture(scope="module")
def target(bidirectional):
    return media_target(bidirectional)


@pytest.fixture(scope="module")
def own(bidirectional):
    return media_model(bidirectional)


@pytest.fixture(params=[False, True], ids=["host", "device"])
def ahead(request):
    return request.param


class Recorded:
    """Logits and features of every position that a target computes, the first time that it does."""

    def __init__(self, target, monkeypatch):
        self.logits, self.features, self.calls = {}, {}, []
        forward = target.forward

        def recording(ids, positions, attend, logit_rows=None, out=None, on_features=None, media=None):
            logits, features = forward(ids, positions, attend, media=media)
            for row, position in enumerate(positions.tolist()):
                if position not in self.logits:
                    self.logits[position], self.features[position] = logits[row].clone(), features[row].clone()
            self.calls.append(positions.tolist())
            if on_features is not None:
                on_features(list(features.split(target.hidden_size, -1)))
            logits = logits if logit_rows is None else logits[logit_rows]
            return (logits if out is None else out.copy_(logits)), features

        monkeypatch.setattr(target, "forward", recording)


@pytest.mark.parametrize("chunk", [72, 300])
@pytest.mark.parametrize("mix", MIXES)
def test_prompts_in_chunks_over_pages(target, own, ahead, mix, chunk, monkeypatch):
    prompt = MediaPrompt.of(target, *MIXES[mix]())
    draft = tiny_draft(target)
    engine = small_engine(target, draft, max_num_batched_tokens=chunk, async_scheduling=ahead, **LIMITS)
    recorded = Recorded(target, monkeypatch)
    [output] = run(engine, [prompt.request()])
    monkeypatch.undo()
    logits, features = prompt.own_forward(own, output.tokens)
    assert output.tokens == logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()
    layers = list(draft.config.target_layer_ids)
    for position in range(len(prompt.ids)):
        torch.testing.assert_close(recorded.logits[position], logits[position], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(recorded.features[position], features[position, layers].flatten(), atol=2e-4, rtol=1e-4)
    engine.check_idle()


def test_what_the_draft_proposes_behind_media_is_what_its_equations_say(target, own):
    prompts = [MediaPrompt.of(target, *MIXES[mix]()) for mix in ("audio", "mix")]
    draft = tiny_draft(target)
    engine = small_engine(target, draft, max_num_batched_tokens=96, async_scheduling=True, max_num_seqs=4, **LIMITS)
    requests = [prompt.request() for prompt in prompts]
    waiting = {request.id: prompt for request, prompt in zip(requests, prompts, strict=True)}
    for request in requests:
        engine.add(request)
    compared = 0
    while engine.has_work:
        engine.settle()
        before = {s.slot: (s.request.id, list(s.output.tokens)) for s in engine.scheduler.running if s.output.tokens}
        engine.step()
        for slot, (request_id, tokens) in before.items():
            features = waiting[request_id].own_forward(own, tokens[:-1])[1][:, list(draft.config.target_layer_ids)]
            logits = propose_offline(draft, features.flatten(1), tokens[-1], target.embed_rows, target.head)
            assert engine.runner.state.proposals[slot].tolist() == logits.argmax(-1).tolist()
            compared += 1
    assert compared > 10


def test_no_chunk_cuts_an_image_that_sees_itself_whole(target, ahead, bidirectional, monkeypatch):
    prompts = [MediaPrompt.of(target, *MIXES[mix]()) for mix in ("images", "mix")]
    engine = small_engine(target, max_num_batched_tokens=72, async_scheduling=ahead, **LIMITS)
    ends: list[tuple[int, int]] = []
    launch = engine.runner.launch

    def noting(batch):
        ends.extend((prompts[c.sequence.arrival], c.start + c.count) for c in batch.prefill)
        return launch(batch)

    engine.runner.launch = noting
    outputs = run(engine, [prompt.request() for prompt in prompts])
    alone = [run(small_engine(target, max_num_batched_tokens=400, **LIMITS), [p.request()])[0].tokens for p in prompts]
    assert [output.tokens for output in outputs] == alone
    cut = [(p, end) for p, end in ends for s in p.spans if s.start < end < s.start + s.length and p.ids[s.start] == IMAGE]
    assert bool(cut) != bidirectional


def test_the_same_text_with_other_pixels_shares_no_pages_behind_them(target, own, ahead, bidirectional):
    first, again = ([text(1, 40), picture(1), text(2, 40)] for _ in range(2))
    other = [text(1, 40), picture(9), text(2, 40)]
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=100, async_scheduling=ahead, **LIMITS)
    outputs = []
    for pieces in (first, again, other):
        prompt = MediaPrompt.of(target, *pieces)
        [output] = run(engine, [prompt.request()])
        logits = prompt.own_forward(own, output.tokens)[0]
        assert output.tokens == logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()
        outputs.append((prompt, output))
    image = outputs[0][0].spans[0]
    length = len(outputs[0][0].ids)
    assert [output.cached_tokens for _, output in outputs] == [0, (length - 1) // 16 * 16, image.start // 16 * 16]


def test_a_hit_ends_before_an_image_that_sees_itself_whole(target, ahead, bidirectional):
    prompt = MediaPrompt.of(target, text(1, 40), picture(1))
    engine = small_engine(target, max_num_batched_tokens=100, async_scheduling=ahead, **LIMITS)
    run(engine, [prompt.request(max_tokens=1)])
    [output] = run(engine, [prompt.request()])
    inside = (len(prompt.ids) - 1) // 16 * 16
    span = prompt.spans[0]
    assert span.start < inside < span.start + span.length
    assert output.cached_tokens == (span.start // 16 * 16 if bidirectional else inside)


def test_a_preempted_request_has_its_media_computed_again(target, own, ahead):
    prompt = MediaPrompt.of(target, text(1, 20), picture(1), text(2, 9), sound(1), text(3, 9))
    engine = small_engine(target, max_num_batched_tokens=80, async_scheduling=ahead, enable_prefix_caching=False, **LIMITS)

    def preempt(engine, step):
        if step == 6:
            engine.settle()
            [sequence] = engine.scheduler.running
            engine.scheduler.preempt(sequence)

    [output] = run(engine, [prompt.request()], preempt)
    logits = prompt.own_forward(own, output.tokens)[0]
    assert output.tokens == logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()
    assert output.preemptions == 1
    engine.check_idle()


def test_numbers_that_are_not_finite_stay_with_their_request(target, ahead):
    """Padding repeats the first row of a chunk: what it stores nobody may read."""
    engine = small_engine(target, tiny_draft(target), max_num_batched_tokens=100, async_scheduling=ahead, **LIMITS)
    prompt = MediaPrompt.of(target, text(1, 9))
    [before] = run(engine, [prompt.request()])
    broken = MediaPrompt.of(target, sound(1), text(2, 20))
    spans = [replace(span, start=0, embeddings=span.embeddings * math.nan, key="broken") for span in broken.spans]
    [output] = run(engine, [Request(broken.ids[1:], SamplingParams(temperature=0.0), media=tuple(spans))])
    assert "logits are broken" in str(output.error)
    engine.pool.flush()
    [after] = run(engine, [prompt.request()])
    assert after.tokens == before.tokens


def refusal(engine, request) -> str:
    with pytest.raises(RequestError) as caught:
        engine.add(request)
    return str(caught.value)


def test_placeholders_without_media_and_media_without_placeholders_are_refused(target, bidirectional):
    engine = small_engine(target, max_num_batched_tokens=64, **LIMITS)
    prompt = MediaPrompt.of(target, text(1, 5), picture(1), text(2, 5))
    bare = prompt.request()
    bare.media = ()
    assert refusal(engine, bare).startswith(f"the prompt holds token {IMAGE}, which stands for an image or audio, where there")
    typed = prompt.request()
    typed.prompt += [IMAGE]
    assert f"token {IMAGE}, which stands for" in refusal(engine, typed)
    shifted = prompt.request()
    shifted.prompt.insert(0, EOI)
    assert "media must lie where the prompt has their placeholders" in refusal(engine, shifted)
    twice = prompt.request()
    twice.media *= 2
    assert "positions of their own" in refusal(engine, twice)
    engine = small_engine(target, max_num_batched_tokens=48, **LIMITS)
    if bidirectional:
        assert "a step takes 48: raise max_num_batched_tokens" in refusal(engine, prompt.request())
    else:
        assert run(engine, [prompt.request()])[0].finish_reason == "length"


def test_a_step_takes_the_largest_image_unless_told_otherwise():
    for bidirectional, most in ((False, 256), (True, 560)):
        target = media_target(bidirectional)
        target.media.image_processor.max_soft_tokens = 560
        assert small_engine(target, max_num_batched_tokens=None, **LIMITS).scheduler.max_num_batched_tokens == most


def test_images_in_bfloat16_on_the_host():
    target, own = media_target(True, torch.bfloat16), media_model(True, torch.bfloat16)
    target.media.KEPT_BYTES = 0
    prompt = MediaPrompt.of(target, *MIXES["mix"]())
    engine = small_engine(target, max_num_batched_tokens=300, **LIMITS)
    again = MediaPrompt.of(target, *MIXES["mix"]())  # behind what the engine has done to the target's products
    for span, other in zip(prompt.spans, again.spans, strict=True):
        torch.testing.assert_close(span.embeddings, other.embeddings, atol=0, rtol=0)
    [output] = run(engine, [again.request(max_tokens=4)])
    logits = prompt.own_forward(own, output.tokens)[0][len(prompt.ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 0.5
