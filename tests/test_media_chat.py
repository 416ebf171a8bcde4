"""Images and audio in conversations with LLM: what they become in the prompt, what is answered, and what is refused."""

from __future__ import annotations

import base64
import io
import random
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from media_saved import MARKS, data_url, encoded, saved_media_target, wav
from multimodal import AUDIO, IMAGE, feature_extractor, media_model, own_media_forward, picture, sound
from PIL import Image
from saved import saved_pair

from flashdraft import LLM, SamplingParams
from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError, RequestError
from flashdraft.media import FORMATS, MediaLimits, _read_image, _resampled, _samples_of, read_media

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PICTURE, SOUND = picture(1), sound(1)
IMAGE_PART = {"type": "image_url", "image_url": {"url": data_url(encoded(PICTURE))}}
AUDIO_PART = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(SOUND)).decode(), "format": "wav"}}
LIMITS = dict(max_model_len=512, max_num_batched_tokens=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_media_target(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", device="cpu", **LIMITS)


@pytest.fixture(scope="module")
def text_only(tmp_path_factory):
    return LLM(saved_pair(tmp_path_factory.mktemp("text")).target, dtype="float32", device="cpu", max_model_len=256)


def asked(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


def test_a_conversation_with_an_image_and_audio(llm):
    [answer] = llm.chat(asked("look", IMAGE_PART, " and ", AUDIO_PART, "?"), GREEDY)
    image = MARKS[0] + MARKS[1] * 63 + MARKS[2]
    frames = feature_extractor()([SOUND])["input_features_mask"][0]  # two convolutions of stride 2 follow
    audio = MARKS[4] + MARKS[3] * int(frames[::2][::2].sum()) + MARKS[5]
    text = f"<|user|>look{image} and {audio}?</s><|assistant|>"
    assert answer.prompt_token_ids == llm.tokenizer(text)["input_ids"]
    samples = np.round(SOUND * 32768).astype(np.float32) / 32768
    ids, tokens = answer.prompt_token_ids, answer.outputs[0].token_ids
    behind = [0 if t in (IMAGE, AUDIO) else t for t in tokens]
    logits = own_media_forward(media_model(), ids + behind, [PICTURE], [samples])[0]
    assert tokens == logits[len(ids) - 1 : -1].argmax(-1).tolist()


def test_it_is_answered_alike_in_a_stream_and_the_second_time_from_the_prefix_cache(llm):
    question = asked(AUDIO_PART, "what is", IMAGE_PART)
    whole, again = llm.chat(question, GREEDY)[0], llm.chat(question, GREEDY)[0]
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids
    assert again.num_cached_tokens >= len(whole.prompt_token_ids) - 16
    deltas = list(llm.chat(question, GREEDY, stream=True))
    assert [t for d in deltas for t in d.token_ids] == whole.outputs[0].token_ids


SAME_IMAGE = {
    "a picture": {"type": "image", "image": PICTURE},
    "bytes": {"type": "image", "image": encoded(PICTURE)},
    "a bare address": {"type": "image_url", "image_url": data_url(encoded(PICTURE))},
    "of the responses API": {"type": "input_image", "image_url": data_url(encoded(PICTURE)), "detail": "auto"},
    "with transparency": {"type": "image", "image": encoded(PICTURE.convert("RGBA"))},
    "another format": {"type": "image", "image": encoded(PICTURE, "BMP")},
    "broken into lines": {"type": "image_url", "image_url": "data:;base64," + base64.encodebytes(encoded(PICTURE)).decode()},
}
SAME_SOUND = {
    "samples": {"type": "audio", "audio": np.round(SOUND * 32768) / 32768 + 0.0},
    "bytes": {"type": "audio", "audio": wav(SOUND)},
    "an address": {"type": "audio_url", "audio_url": {"url": data_url(wav(SOUND), "audio/wav")}},
    "an address as data": {"type": "input_audio", "input_audio": {"data": data_url(wav(SOUND), "audio/wav")}},
    "raw bytes": {"type": "input_audio", "input_audio": {"data": wav(SOUND)}},
    "two channels": {"type": "audio", "audio": wav(np.stack([SOUND, SOUND], 1), channels=2)},
}


@pytest.mark.parametrize("part", [*SAME_IMAGE.values(), *SAME_SOUND.values()], ids=[*SAME_IMAGE, *SAME_SOUND])
def test_the_same_content_in_other_words_is_the_same_prompt(llm, part):
    own = IMAGE_PART if "image" in part["type"] else AUDIO_PART
    one, other = llm.prompt(asked("a", own, "b")), llm.prompt(asked("a", part, "b"))
    assert one.ids == other.ids
    assert [span.key for span in one.media] == [span.key for span in other.media]


def test_a_turned_photograph_is_seen_as_its_camera_meant_it(llm):
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    PICTURE.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
    turned = {"type": "image", "image": file.getvalue()}
    assert llm.prompt(asked(turned)).media[0].key == llm.prompt(asked(IMAGE_PART)).media[0].key


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wave_files_of_every_width(width):
    samples, rate = _samples_of(wav(SOUND, 22_050, width), MediaLimits())
    assert rate == 22_050
    np.testing.assert_allclose(samples, SOUND, atol=2.0 ** (1 - 8 * width) * 1.1)


def wave_file(
    data: bytes, kind: int, bits: int, *, channels: int = 1, extensible: bool = False, size: int | None = None
) -> bytes:
    """A wave file of samples at 16 kHz, with a chunk of odd length before them; size: what its header says instead."""
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, 16_000, 16_000 * frame, frame, bits)
    if extensible:
        form += struct.pack("<HHIH", 22, bits, 0, kind) + b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    chunks = [(b"LIST", b"odd", 3), (b"fmt ", form, len(form)), (b"data", data, len(data) if size is None else size)]
    body = b"".join(name + struct.pack("<I", n) + part + b"\0" * (len(part) % 2) for name, part, n in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


PCM16 = np.round(SOUND * 32768).astype("<i2")
STEREO = np.stack([PCM16 + 3, PCM16 - 3], 1)
SAME_WAVES = {
    "floats": wave_file((PCM16 / 32768).astype("<f4").tobytes(), 3, 32),
    "doubles": wave_file((PCM16 / 32768).astype("<f8").tobytes(), 3, 64),
    "an extensible header": wave_file(STEREO.tobytes(), 1, 16, channels=2, extensible=True),
    "24 bits": wave_file((PCM16.astype("<i4") << 8).view("u1").reshape(-1, 4)[:, :3].tobytes(), 1, 24, extensible=True),
    "written to a pipe": wave_file(PCM16.tobytes(), 1, 16, size=0xFFFFFFFF),
    "written to a pipe by others": wave_file(PCM16.tobytes(), 1, 16, size=0x7FFFFFFF - 36),
}


@pytest.mark.parametrize("name", SAME_WAVES)
def test_wave_files_of_every_kind_need_no_library(name):
    samples, rate = _samples_of(SAME_WAVES[name], MediaLimits())
    assert rate == 16_000
    np.testing.assert_allclose(samples, PCM16 / 32768, atol=1e-7)


def seen(llm, content) -> np.ndarray:
    return np.asarray(_read_image(image(content), "image", llm.target.media, MediaLimits()))


def test_what_is_transparent_is_white(llm):
    pixels = np.zeros((20, 20, 4), np.uint8)
    pixels[5:9, 5:9, 3], pixels[10:, :, 3] = 255, 51
    for picture_ in (Image.fromarray(pixels), encoded(Image.fromarray(pixels)), Image.fromarray(pixels[..., 2:])):
        assert [seen(llm, picture_)[place].tolist() for place in ((0, 0), (6, 6), (15, 0))] == [[255] * 3, [0] * 3, [204] * 3]
    palette, file = Image.new("P", (20, 20), 0), io.BytesIO()
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(file, "GIF", transparency=0)
    assert (seen(llm, file.getvalue()) == 255).all()


def test_16_bits_a_channel_are_scaled_to_8(llm):
    wide = (np.arange(400).reshape(20, 20) * 160).astype(np.uint16)
    got = seen(llm, encoded(Image.fromarray(wide)))
    assert np.abs(got - wide[..., None] / 257).max() <= 1


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_a_sound_at_another_rate_is_the_same_sound(rate):
    seconds = 0.5
    heard, wanted = (np.sin(2 * np.pi * 440 * np.arange(int(n * seconds)) / n).astype(np.float32) for n in (rate, 16_000))
    got = _resampled(heard, rate, 16_000)
    assert abs(len(got) - len(wanted)) <= 1
    n = min(len(got), len(wanted))
    assert np.abs(got[:n] - wanted[:n])[200:-200].max() < 0.01  # at the ends a sound that is cut off rings


def test_parts_of_text_alone_are_one_text(llm, text_only):
    for one in (llm, text_only):
        whole = one.prompt([{"role": "user", "content": "the quick\nbrown"}])
        assert one.prompt(asked("the quick", {"type": "input_text", "text": "brown"})).ids == whole.ids


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "a"}, "b"], "a message is a dict such as"),
        ([{"role": "user", "content": {"type": "text", "text": "a"}}], "a text or a list of parts"),
        ([{"role": "user", "content": 3}], "a text or a list of parts"),
    ],
)
def test_what_is_no_message_is_refused(llm, messages, said):
    with pytest.raises(RequestError, match=said):
        llm.chat(messages, GREEDY)


def refusal(llm, *parts, kind: type[FlashdraftError] = RequestError) -> str:
    with pytest.raises(FlashdraftError) as caught:
        llm.chat(asked(*parts), GREEDY)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 320
    return message


def image(content) -> dict:
    return {"type": "image", "image": content}


def audio(content) -> dict:
    return {"type": "audio", "audio": content}


def url(text) -> dict:
    return {"type": "image_url", "image_url": {"url": text}}


def header_of(image_: Image.Image, width: int, height: int) -> bytes:
    """The PNG file of an image whose header says another size."""
    file = encoded(image_)
    body = b"IHDR" + struct.pack(">II", width, height) + file[24:29]
    return file[:12] + body + struct.pack(">I", zlib.crc32(body)) + file[33:]


BAD = {
    "no picture": (lambda: image(b"%PDF-1.7 is no image"), "this image cannot be read (cannot identify image file)"),
    "empty": (lambda: image(b""), "this image cannot be read"),
    "truncated": (lambda: image(encoded(PICTURE)[:-900]), "this image cannot be read"),
    "a broken middle": (lambda: image(encoded(PICTURE, "JPEG")[:300]), "this image cannot be read"),
    "PostScript": (lambda: image(encoded(PICTURE, "EPS")), "one of PNG, JPEG, WEBP, GIF, BMP"),
    "30,000 pixels wide and high": (lambda: image(header_of(PICTURE, 30_000, 30_000)), "more than the 50,000,000 pixels"),
    "9,000 pixels wide and high": (lambda: image(header_of(PICTURE, 9_000, 9_000)), "has 9000 x 9000 pixels, and 50,000,000"),
    "30,000 pixels wide": (lambda: image(header_of(PICTURE, 30_000, 10)), "has 30000 x 10 pixels"),
    "no data": (lambda: {"type": "image_url"}, "a part of type image_url holds no data: give a data URL"),
    "a number": (lambda: url(7), "a part of type image_url holds no data"),
    "remote": (lambda: url("https://example.com/a.png"), "remote addresses are not fetched: send the content of this image"),
    "a file": (lambda: url("file:///etc/passwd"), "the address of this image is no data URL"),
    "no base64": (lambda: url("data:image/png;base64,@@@@"), "is no valid base64"),
    "not in base64": (lambda: url("data:image/svg+xml,<svg/>"), "is no data URL"),
    "too many bytes": (lambda: image(bytes(21 << 20)), "of 21.0 MiB is more than the 20.0 MiB that are taken"),
    "too much base64": (lambda: url("data:image/png;base64," + "A" * (29 << 20)), "of 21.8 MiB is more than the 20.0"),
    "audio that is none": (lambda: audio(b"OggS"), "audio"),
    "no audio": (lambda: {"type": "input_audio", "input_audio": {"format": "wav"}}, "a part of type input_audio holds no data"),
    "cut audio": (lambda: audio(wav(SOUND)[:-1000]), "this audio ends before its header says"),
    "an hour": (lambda: audio(wav(np.zeros(3600 * 2000), 2000, 1)), "this audio is 3,600.0 seconds long, and 30 are taken"),
    "an hour of samples": (lambda: audio(np.zeros(3600 * 16_000, np.float32)), "this audio is 3,600.0 seconds long"),
    "a rate of no sound": (lambda: audio(wav(SOUND, 999)), "this audio has 999 samples a second, and 1,000 to 400,000"),
    "a huge rate": (lambda: audio(wav(SOUND, 2**31 - 1)), "this audio has 2,147,483,647 samples a second"),
    "integers": (lambda: audio(np.zeros(100, np.int16)), "one row of numbers in -1..1, 16000 a second"),
    "not a number": (lambda: audio(np.full(900, np.nan, np.float32)), "samples that are no numbers"),
    "not a number in a file": (
        lambda: audio(wave_file(np.full(900, np.nan, "<f4").tobytes(), 3, 32)),
        "samples that are no numbers",
    ),
    "of another scale": (lambda: audio(np.full(900, 1e300)), "far beyond -1..1"),
    "no pixels": (lambda: image(Image.new("RGB", (0, 5))), "this image has no pixels"),
    "a part in a list": (lambda: [image(PICTURE)], "a part of a message is a dict such as"),
    "a part of no type": (lambda: {"text": "a"}, "a part of a message is a dict such as"),
    "a text without text": (lambda: {"type": "text"}, "a part of a message is a dict such as"),
    "no text": (lambda: {"type": "text", "text": "\ud800"}, "not valid Unicode text"),
    "no samples": (lambda: audio(np.zeros(0, np.float32)), "this audio"),
    "a few samples": (lambda: audio(np.zeros(5, np.float32)), "this audio"),
    "video": (lambda: {"type": "video_url", "video_url": {"url": "data:"}}, "a part of type video_url is not served"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_media_is_refused_in_a_sentence(llm, name):
    make, said = BAD[name]
    assert said in refusal(llm, "look", make())
    assert not llm.engine.has_work


WHOLE = {kind: image(encoded(PICTURE, kind)) for kind in FORMATS} | {
    f"wave {n}": audio(wav(SOUND, width=n)) for n in (1, 2, 3, 4)
}


@pytest.mark.parametrize("name", WHOLE)
def test_broken_files_are_read_or_refused_in_a_sentence(llm, name):
    rng, [kind, content] = random.Random(0), WHOLE[name].values()
    refused = []
    for _ in range(40):
        broken = bytearray(content)
        for _ in range(rng.choice((1, 2, 5, 20))):
            broken[rng.randrange(min(len(broken), rng.choice((64, 200, len(broken)))))] = rng.randrange(256)
        part = {"type": kind, kind: bytes(broken[: rng.randrange(len(broken))] if rng.random() < 0.3 else broken)}
        try:
            read_media(asked(part), llm.target.media, MediaLimits())
        except RequestError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert not any("\n" in said for said in refused)


def test_more_media_than_the_limits(llm):
    assert "may hold 16 images" in refusal(llm, *[IMAGE_PART] * 17)
    assert "may hold 8 audio clips" in refusal(llm, *[AUDIO_PART] * 9)
    assert "the prompt has" in refusal(llm, *[IMAGE_PART] * 9)  # they are in the limits, and not in the context
    with pytest.raises(RequestError, match=r"^no images are taken here: leave them out, or raise the limit$"):
        read_media(asked(IMAGE_PART), llm.target.media, MediaLimits(images=0))


@pytest.mark.parametrize("parts", [(MARKS[1],), (MARKS[1], IMAGE_PART), (AUDIO_PART, f"a{MARKS[3]}"), (MARKS[6], IMAGE_PART)])
def test_a_placeholder_typed_by_a_user_is_refused(llm, parts):
    said = refusal(llm, "see ", *parts)
    assert "leave out the placeholder tokens in its texts" in said or "an image or audio, where there is none" in said


def test_a_placeholder_in_a_plain_prompt_is_refused(llm):
    with pytest.raises(RequestError, match="stands for an image or audio, where there is none"):
        llm.generate(f"see {MARKS[1]}", GREEDY)


def test_a_text_only_target_takes_no_media(text_only):
    assert "this target takes text alone, and this is a part of type image_url: leave it out" in refusal(text_only, IMAGE_PART)
    assert "a part of type input_audio" in refusal(text_only, AUDIO_PART)


def test_a_target_without_processors_serves_text_and_says_what_is_missing(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "processor_config.json":
            (tmp_path / file.name).symlink_to(file)
    llm = LLM(tmp_path, dtype="float32", device="cpu", **LIMITS)
    assert len(llm.chat(asked("hello"), GREEDY)[0].outputs[0].token_ids) == 8
    assert "no usable image processor" in refusal(llm, IMAGE_PART, kind=CheckpointError)
    assert "no usable feature extractor" in refusal(llm, AUDIO_PART, kind=CheckpointError)


def test_without_pillow_images_are_refused_by_name(llm, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert refusal(llm, IMAGE_PART, kind=ConfigError) == "images need Pillow: pip install 'flashdraft[media]'"
    assert len(llm.chat(asked("a", AUDIO_PART), GREEDY)[0].outputs[0].token_ids) == 8


def test_text_is_answered_as_by_transformers(llm):
    [answer] = llm.chat(asked("the quick brown fox"), GREEDY)
    ids = torch.tensor([answer.prompt_token_ids])
    expected = media_model().generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert answer.outputs[0].token_ids == expected.tolist()
