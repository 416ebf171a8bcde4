"""Images and audio: what transformers' own forward computes for a prompt with media, our target computes too (float32)."""

from __future__ import annotations

import pytest
import torch
from families import make
from media_prompts import MediaPrompt, text
from multimodal import AUDIO, BOA, BOI, EOA, EOI, IMAGE, media_model, media_target, picture, sound
from paged import assert_close, own_forward

from flashdraft.errors import RequestError
from flashdraft.targets.fused import fuse
from flashdraft.targets.media import Marks
from flashdraft.targets.target import Target, packed_attend

MIXES = {
    "text": lambda: [text(1, 40)],
    "an image": lambda: [text(1, 9), picture(1), text(2, 20)],
    "images": lambda: [text(1, 5), picture(1), picture(2, 70, 20), text(2, 7), picture(3, 20, 20), text(3, 3)],
    "audio": lambda: [text(1, 9), sound(1), text(2, 20)],
    "a mix": lambda: [text(1, 30), sound(1, 0.3), text(4, 2), picture(1), text(2, 11), sound(2, 0.71), picture(4), text(3, 5)],
}


@pytest.fixture(scope="module", params=[False, True], ids=["causal", "bidirectional"])
def pair(request):
    return media_target(request.param), media_model(request.param)


@pytest.mark.parametrize("mix", MIXES)
def test_logits_and_features_are_those_of_the_model(pair, mix):
    target, own = pair
    case = MediaPrompt.of(target, *MIXES[mix]())
    expected = case.own_forward(own)
    media, reach = case.rows()
    target.capture(range(target.num_layers))
    ids, positions = torch.tensor(case.ids), torch.arange(len(case.ids))
    logits, features = target.forward(ids, positions, packed_attend(ids * 0, positions, reach), media=media)
    assert_close((logits, features.unflatten(-1, (target.num_layers, -1))), expected, slice(0, len(ids)), rtol=1e-4)
    if case.spans:  # and it would show if media were left out
        bare = own_forward(own, case.ids)[0]
        assert (bare - expected[0])[-1].abs().max() > 0.1


def test_a_fused_target_takes_media_too():
    target, own = media_target(), media_model()
    case = MediaPrompt.of(target, *MIXES["a mix"]())
    expected = case.own_forward(own)
    assert fuse(target).kept == {}
    assert target.end is not None
    target.capture(range(target.num_layers))
    ids, positions = torch.tensor(case.ids), torch.arange(len(case.ids))
    logits, features = target.forward(ids, positions, packed_attend(ids * 0, positions), media=case.rows()[0])
    assert_close((logits, features.unflatten(-1, (target.num_layers, -1))), expected, slice(0, len(ids)), rtol=1e-4)


def test_an_encoder_that_gives_no_finite_numbers_is_told(monkeypatch):
    encoder = media_target().media
    monkeypatch.setattr(encoder, "_encode", lambda kind, inputs: torch.full((3, 64), torch.inf))
    with pytest.raises(RequestError, match="gives numbers for this audio that are not finite"):
        encoder.encode("audio", sound(1))


def test_the_same_content_is_encoded_once_until_others_take_its_place(monkeypatch):
    encoder, calls = media_target().media, []
    encode = encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda kind, inputs: calls.append(kind) or encode(kind, inputs))
    first = encoder.encode("image", picture(1))
    assert encoder.encode("image", picture(1)) is first
    encoder.encode("audio", sound(1))
    assert calls == ["image", "audio"]
    monkeypatch.setattr(encoder, "KEPT_BYTES", first.embeddings.nbytes + 1)
    encoder.encode("image", picture(2))  # as large as the first
    assert encoder.encode("image", picture(1)).key == first.key
    assert calls == ["image", "audio", "image", "image"]


def test_a_target_without_an_audio_tower_takes_images_alone():
    encoder = Target(make("gemma4 multimodal"), check=False).media
    assert set(encoder.marks) == {"image"}
    with pytest.raises(RequestError, match="this target takes no audio: leave it out"):
        encoder.encode("audio", sound(1))
    assert Target(make("gemma3 multimodal"), check=False).media is None


def test_only_sliding_layers_see_whole_images_and_only_where_the_model_says_so(pair):
    target = pair[0]
    whole = target.media.sees_whole_images
    assert [s.sees_whole_images for s in target.layer_specs] == [whole and s.window is not None for s in target.layer_specs]
    assert target.media.marks == {"image": Marks(BOI, IMAGE, EOI), "audio": Marks(BOA, AUDIO, EOA)}
