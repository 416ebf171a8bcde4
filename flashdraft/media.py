"""Images and audio in conversations: read from the parts of messages, within limits, and placed among the prompt's tokens."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import numpy as np

from flashdraft.engine.request import Span
from flashdraft.errors import ConfigError, RequestError, counted
from flashdraft.targets.media import Encoded, Kind, MediaEncoder

# Types of parts: OpenAI's, vLLM's and transformers' names.
KINDS: dict[str, Kind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}
TEXTS = ("text", "input_text", "output_text", "refusal")
NOT_SERVED = ("video", "video_url", "input_video", "file", "input_file", "document")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others run programs (EPS) or hold many pictures
LOUDEST = 100.0  # samples beyond -1..1 are played as they are, but numbers of another scale are no sound
RATES = (1_000, 400_000)  # samples a second; beyond, resampling might need any memory
TRANSPARENT = ("LA", "PA", "RGBA", "La", "RGBa")  # Pillow's modes
UNKNOWN_SIZE = 0x7FFFFFFF - 0xFFFF  # bytes: sizes from there on, of files written to a pipe, say that the writer knew none
MAX_CHUNKS = 1000  # of a wave file, before its data
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # formats of wave files
_WAVE_TYPES = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "<i4", (PCM, 32): "<i4", (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.+=-]+)*;base64,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class MediaLimits:
    """Of one conversation: images and audio clips; bytes of each file; of an image pixels, and those of a side; seconds of a
    clip.
    """

    images: int = 16
    clips: int = 8
    bytes: int = 20 << 20
    pixels: int = 50_000_000
    side: int = 16_384
    seconds: float = 30.0


@dataclass(frozen=True)
class TokensPrompt:
    """Token ids of a prompt, with the placeholders of media and what stands there."""

    ids: list[int]
    media: tuple[Span, ...] = ()


def read_media(
    messages: Sequence[Mapping[str, Any]], encoder: MediaEncoder | None, limits: MediaLimits
) -> tuple[list[Mapping[str, Any]], list[Encoded]]:
    """Messages as chat templates take them, and the media in order: the content of each is a text, or where it holds media a
    list of texts and media without their data. Media are encoded one by one: many large images do not lie in memory at once.

    Raises RequestError for what the target does not take, for what cannot be read and for what is more than the limits.
    """
    media: list[Encoded] = []
    clean = [_read_message(message, encoder, limits, media) for message in messages]
    return clean, media


def _read_message(
    message: Mapping[str, Any], encoder: MediaEncoder | None, limits: MediaLimits, media: list[Encoded]
) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError("a message is a dict such as {'role': 'user', 'content': 'Hello'}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list | tuple):
        raise RequestError("the content of a message is a text or a list of parts")
    parts: list[dict[str, str]] = []
    for part in content:
        if (text := text_of(part)) is not None:
            parts.append({"type": "text", "text": text})
            continue
        name = part.get("type") if isinstance(part, Mapping) else None
        if name in NOT_SERVED:
            raise RequestError(f"a part of type {name} is not served: send text, images and audio")
        kind = KINDS.get(name) if isinstance(name, str) else None
        if name is None or kind is None:
            raise RequestError(
                "a part of a message is a dict such as {'type': 'text', 'text': 'Hello'}, or of an image or audio"
            )
        if encoder is None:
            raise RequestError(f"this target takes text alone, and this is a part of type {name}: leave it out")
        if kind not in encoder.marks:
            raise RequestError(f"this target takes no {kind}: leave it out")
        most, noun = (limits.images, "image") if kind == "image" else (limits.clips, "audio clip")
        if not most:
            raise RequestError(f"no {noun}s are taken here: leave them out, or raise the limit")
        if sum(one.kind == kind for one in media) == most:
            raise RequestError(f"a conversation may hold {counted(most, noun)}, and this one holds more: leave some out")
        read = _read_image if kind == "image" else _read_audio
        media.append(encoder.encode(kind, read(part, name, encoder, limits)))
        parts.append({"type": kind})
    if all(part["type"] == "text" for part in parts):
        return {**message, "content": "\n".join(part["text"] for part in parts)}  # many templates take nothing else
    return {**message, "content": parts}


def text_of(part: Any) -> str | None:
    """The text of a part of a message, None for what is no part of text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in TEXTS:
        return None
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else None


def place_media(ids: Sequence[int], media: Sequence[Encoded], encoder: MediaEncoder) -> TokensPrompt:
    """The prompt with room for media where a chat template has put one placeholder for each.

    Raises RequestError where there are more or fewer of them: typed by a user, or not written by the template.
    """
    placeholders: dict[int, Kind] = {mark.placeholder: kind for kind, mark in encoder.marks.items()}
    found: list[Kind] = [placeholders[token] for token in ids if token in placeholders]
    if found != (given := [one.kind for one in media]):
        raise RequestError(
            f"this conversation has {len(given)} images and audio clips, and {len(found)} placeholders of them in its prompt: "
            "leave out the placeholder tokens in its texts, or use a chat template that writes one for each"
        )
    encoded = iter(media)
    out: list[int] = []
    spans: list[Span] = []
    for token in ids:
        if token not in placeholders:
            out.append(token)
            continue
        one, mark = next(encoded), encoder.marks[placeholders[token]]
        spans.append(_span(one, len(out) + 1))
        out += [mark.begin, *[mark.placeholder] * len(one.embeddings), mark.end]
    return TokensPrompt(out, tuple(spans))


def _span(one: Encoded, start: int) -> Span:
    return Span(start, len(one.embeddings), one.key, one.embeddings, one.whole)


def _read_image(part: Mapping[str, Any], name: str, encoder: MediaEncoder, limits: MediaLimits) -> Any:
    """In RGB, by Pillow."""
    given = part.get("image") if name == "image" and "image" in part else part.get("image_url", part.get("url"))
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError("images need Pillow: pip install 'flashdraft[media]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels, which are counted below, and of odd metadata
            if isinstance(given, Image.Image):
                image = given
            else:
                image = Image.open(io.BytesIO(_bytes_of(given, name, limits)), formats=FORMATS)
            width, height = image.size
            if not width or not height:
                raise RequestError("this image has no pixels: leave it out")
            if width * height > limits.pixels or max(width, height) > limits.side:
                raise RequestError(
                    f"this image has {width} x {height} pixels, and {limits.pixels:,} are taken, {limits.side:,} on a side: "
                    "send a smaller one"
                )
            return _as_rgb(ImageOps.exif_transpose(image))
    except RequestError:
        raise
    except Image.DecompressionBombError as error:
        raise RequestError(
            f"this image has more than the {limits.pixels:,} pixels that are taken: send a smaller one"
        ) from error
    except Exception as error:  # truncated and broken files surface as OSError, SyntaxError, ValueError, struct.error and more
        reason = shorten(str(error).partition(" <")[0], 100)
        raise RequestError(f"this image cannot be read ({reason}): send a whole file in one of {', '.join(FORMATS)}") from error


def _as_rgb(image: Any) -> Any:
    """In RGB, transparent on white as in vLLM; 16 bits a channel to 8, where Pillow would cut off what is above 255."""
    if image.mode.startswith("I;16"):
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    if image.mode in TRANSPARENT or "transparency" in image.info:
        from PIL import Image

        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _read_audio(part: Mapping[str, Any], name: str, encoder: MediaEncoder, limits: MediaLimits) -> np.ndarray:
    """Mono samples at the target's rate, float32."""
    given = part.get(name, part.get("url"))
    if isinstance(given, np.ndarray):
        rate, samples = encoder.sampling_rate, given
        if samples.ndim != 1 or samples.dtype.kind != "f":
            raise RequestError(f"audio as an array is one row of numbers in -1..1, {rate} a second")
        _check_seconds(len(samples) / rate, limits)
    else:
        if isinstance(given, Mapping) and "data" in given:  # OpenAI's input_audio
            data = given["data"]
            is_bare = isinstance(data, str) and not _DATA_URL.match(data)
            content = _decoded(data, limits) if is_bare else _bytes_of(data, name, limits)
        else:
            content = _bytes_of(given, name, limits)
        samples, rate = _samples_of(content, limits)
        if not RATES[0] <= rate <= RATES[1]:
            raise RequestError(f"this audio has {rate:,} samples a second, and {RATES[0]:,} to {RATES[1]:,} are taken")
    if not (np.abs(samples) <= LOUDEST).all():
        raise RequestError("this audio holds samples that are no numbers, or far beyond -1..1: send others")
    samples = _resampled(samples.astype(np.float32), rate, encoder.sampling_rate)
    if len(samples) < encoder.MIN_SAMPLES:
        raise RequestError(f"this audio has {len(samples)} samples, which are too few to encode: leave it out")
    if len(samples) > encoder.MAX_SAMPLES:
        raise RequestError(
            f"this target takes {encoder.MAX_SAMPLES / encoder.sampling_rate:g} seconds of audio at once: send it in parts"
        )
    return samples


def _bytes_of(given: Any, name: str, limits: MediaLimits) -> bytes:
    """The content of a file: bytes themselves, or those of a data URL."""
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, bytes | bytearray | memoryview):
        if len(given) > limits.bytes:
            raise _too_large(len(given), limits)
        return bytes(given)
    if not isinstance(given, str):
        raise RequestError(f"a part of type {name} holds no data: give a data URL (data:...;base64,...), or bytes in Python")
    if match := _DATA_URL.match(given):
        return _decoded(given[match.end() :], limits)
    if given.startswith(("http://", "https://")):
        raise RequestError(f"remote addresses are not fetched: send the content of this {KINDS[name]} as a data URL")
    raise RequestError(f"the address of this {KINDS[name]} is no data URL: send data:...;base64,... with its content")


def _decoded(text: str, limits: MediaLimits) -> bytes:
    if len(text) * 3 // 4 > limits.bytes + 2:
        raise _too_large(len(text) * 3 // 4, limits)
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # tools break lines
    except (binascii.Error, ValueError) as error:
        raise RequestError("the data of an image or audio clip is no valid base64: encode the whole file") from error


def _too_large(size: int, limits: MediaLimits) -> RequestError:
    return RequestError(
        f"an image or audio clip of {size / 2**20:.1f} MiB is more than the {limits.bytes / 2**20:.1f} MiB that are taken: "
        "send a smaller one"
    )


def _check_seconds(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.seconds:
        raise RequestError(
            f"this audio is {seconds:,.1f} seconds long, and {limits.seconds:g} are taken: send a shorter clip, or several"
        )


def _samples_of(content: bytes, limits: MediaLimits) -> tuple[np.ndarray, int]:
    """Mono samples of a file, in -1..1 for integers, and how many make a second: wave files here, others by soundfile."""
    try:
        kind, channels, rate, bits, data, size = _wave_of(content)
        dtype = _WAVE_TYPES[kind, bits]
        frames = size // (channels * bits // 8)
        _check_seconds(frames / rate, limits)
    except (struct.error, ValueError, KeyError, ZeroDivisionError):  # other formats, or a header that makes no sense
        return _by_soundfile(content, limits)
    if len(data) < size:
        raise RequestError("this audio ends before its header says: send the whole file")
    data = data[: frames * channels * bits // 8]
    if bits == 24:  # the upper bytes of 32 bits
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        values = wide.view(dtype)[:, 0]
    else:
        values = np.frombuffer(data, dtype)
    if kind == PCM:
        values = values / 128.0 - 1.0 if bits == 8 else values / 2.0 ** (8 * values.itemsize - 1)
    return values.reshape(-1, channels).mean(1), rate


def _wave_of(content: bytes) -> tuple[int, int, int, int, memoryview, int]:
    """Of a wave file the format, channels, samples a second, bits a sample, its data, and how many bytes of that its header
    promises: Python's `wave` reads neither floats nor, before 3.12, the extensible header of 24 bits and many channels.

    Raises struct.error and ValueError for what is none.
    """
    riff, _, name = struct.unpack_from("<4sI4s", content)
    if (riff, name) != (b"RIFF", b"WAVE"):
        raise ValueError("no wave file")
    at, form = 12, None
    for _ in range(MAX_CHUNKS):
        name, size = struct.unpack_from("<4sI", content, at)
        at += 8
        if name == b"fmt ":
            kind, channels, rate, _, block, _ = form = struct.unpack_from("<HHIIHH", content, at)
            if kind == EXTENSIBLE:
                (kind,) = struct.unpack_from("<H", content, at + 24)
        elif name == b"data" and form is not None:
            data = memoryview(content)[at:]
            return kind, channels, rate, 8 * (block // channels), data, len(data) if size >= UNKNOWN_SIZE else size
        at += size + size % 2
    raise ValueError("no data among the first chunks")


def _by_soundfile(content: bytes, limits: MediaLimits) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise RequestError(
            "this audio is no wave file that can be read: send one, or install what reads others: pip install "
            "'flashdraft[media]'"
        ) from error
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            _check_seconds(file.frames / file.samplerate, limits)
            return file.read(dtype="float32", always_2d=True).mean(1), int(file.samplerate)
    except RequestError:
        raise
    except Exception as error:  # libsndfile's, for whatever a file may hold
        raise RequestError(
            f"this audio cannot be read ({shorten(str(error), 100)}): send a WAV, FLAC, MP3 or Ogg file"
        ) from error


def _resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """The same sound with `wanted` samples a second: its spectrum, cut or filled up with zeros."""
    if rate == wanted or not len(samples):
        return samples
    # Silence around it keeps the ends from meeting, and makes all lengths whole numbers at both rates.
    unit = rate // math.gcd(rate, wanted)
    before = -(-(rate // 10) // unit) * unit
    padded = np.pad(samples, (before, before + -len(samples) % unit))
    count = len(padded) * wanted // rate
    out = np.fft.irfft(np.fft.rfft(padded)[: count // 2 + 1], count) * (wanted / rate)
    start = before * wanted // rate
    return out[start : start + round(len(samples) * wanted / rate)].astype(np.float32)
