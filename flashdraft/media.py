"""Images and audio in conversations: read from the parts of messages, within limits, and placed among the prompt's tokens."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import warnings
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import numpy as np

from flashdraft.engine.request import Span
from flashdraft.errors import ConfigError, RequestError
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
NOT_SERVED = ("video", "video_url", "input_video", "file", "input_file", "document")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others run programs (EPS) or hold many pictures
RATES = (1_000, 400_000)  # samples a second; beyond, resampling might need any memory
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
class Prompt:
    """Token ids, with the placeholders of media and what stands there."""

    ids: list[int]
    media: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Medium:
    """An image (Pillow's, RGB) or samples (float32, mono, at the target's rate) as read from a message."""

    kind: Kind
    content: Any


def read_media(
    messages: Sequence[Mapping[str, Any]], encoder: MediaEncoder | None, limits: MediaLimits
) -> tuple[list[Mapping[str, Any]], list[Medium]]:
    """Messages as chat templates take them, media parts without their data, and the media in order.

    Raises RequestError for what the target does not take, for what cannot be read and for what is more than the limits.
    """
    media: list[Medium] = []
    clean = [_read_message(message, encoder, limits, media) for message in messages]
    return clean, media


def _read_message(
    message: Mapping[str, Any], encoder: MediaEncoder | None, limits: MediaLimits, media: list[Medium]
) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    for part in content:
        name = part.get("type") if isinstance(part, Mapping) else None
        if name in NOT_SERVED:
            raise RequestError(f"a part of type {name} is not served: send text, images and audio")
        kind = KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            parts.append(part)
            continue
        if encoder is None:
            raise RequestError(f"this target takes text alone, and this is a part of type {name}: leave it out")
        if kind not in encoder.marks:
            raise RequestError(f"this target takes no {kind}: leave it out")
        most, noun = (limits.images, "images") if kind == "image" else (limits.clips, "audio clips")
        if sum(one.kind == kind for one in media) == most:
            raise RequestError(f"a conversation may hold {most} {noun}, and this one holds more: leave some out")
        read = _read_image if kind == "image" else _read_audio
        media.append(Medium(kind, read(part, name, encoder, limits)))  # type: ignore[arg-type]
        parts.append({"type": kind})
    return {**message, "content": parts}


def place_media(ids: Sequence[int], media: Sequence[Medium], encoder: MediaEncoder) -> Prompt:
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
    encoded = iter([encoder.encode(one.kind, one.content) for one in media])
    out: list[int] = []
    spans: list[Span] = []
    for token in ids:
        if token not in placeholders:
            out.append(token)
            continue
        one, mark = next(encoded), encoder.marks[placeholders[token]]
        spans.append(_span(one, len(out) + 1))
        out += [mark.begin, *[mark.placeholder] * len(one.embeddings), mark.end]
    return Prompt(out, tuple(spans))


def _span(one: Encoded, start: int) -> Span:
    return Span(start, len(one.embeddings), one.key, one.embeddings, one.whole)


def _read_image(part: Mapping[str, Any], name: str, encoder: MediaEncoder, limits: MediaLimits) -> Any:
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
            if width * height > limits.pixels or max(width, height) > limits.side:
                raise RequestError(
                    f"this image has {width} x {height} pixels, and {limits.pixels:,} are taken, {limits.side:,} on a side: "
                    "send a smaller one"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except RequestError:
        raise
    except Image.DecompressionBombError as error:
        raise RequestError(
            f"this image has more than the {limits.pixels:,} pixels that are taken: send a smaller one"
        ) from error
    except Exception as error:  # truncated and broken files surface as OSError, SyntaxError, ValueError, struct.error and more
        reason = shorten(str(error).partition(" <")[0], 100)
        raise RequestError(f"this image cannot be read ({reason}): send a whole file in one of {', '.join(FORMATS)}") from error


def _read_audio(part: Mapping[str, Any], name: str, encoder: MediaEncoder, limits: MediaLimits) -> np.ndarray:
    given = part.get(name, part.get("url"))
    if isinstance(given, np.ndarray):
        rate, samples = encoder.sampling_rate, given
        if samples.ndim != 1 or samples.dtype.kind != "f" or not np.isfinite(samples).all():
            raise RequestError(f"audio as an array is one row of finite numbers in -1..1, {rate} a second")
        _check_seconds(len(samples) / rate, limits)
    else:
        if isinstance(given, Mapping) and "data" in given:  # OpenAI's input_audio
            data = given["data"]
            content = _decoded(data, limits) if isinstance(data, str) else _bytes_of(data, name, limits)
        else:
            content = _bytes_of(given, name, limits)
        samples, rate = _samples_of(content, limits)
        if not RATES[0] <= rate <= RATES[1]:
            raise RequestError(f"this audio has {rate:,} samples a second, and {RATES[0]:,} to {RATES[1]:,} are taken")
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
        return base64.b64decode(text, validate=True)
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
    """Mono samples in -1..1 of a file, and how many make a second: PCM wave files here, all others through soundfile."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            _check_seconds(file.getnframes() / file.getframerate(), limits)
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            if not 1 <= width <= 4:
                raise wave.Error(f"{width} bytes a sample")
            data = file.readframes(file.getnframes())
            if len(data) < file.getnframes() * width * channels:
                raise RequestError("this audio ends before its header says: send the whole file")
    except RequestError:
        raise
    except Exception:  # wave.Error for other formats; broken files surface as EOFError, RuntimeError, ZeroDivisionError too
        return _by_soundfile(content, limits)
    if width == 3:  # the upper bytes of 32 bits
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        samples = wide.view("<i4")[:, 0] / 2.0**31
    elif width == 1:
        samples = np.frombuffer(data, np.uint8) / 128.0 - 1.0
    else:
        samples = np.frombuffer(data, f"<i{width}") / 2.0 ** (8 * width - 1)
    return samples.reshape(-1, channels).mean(1), rate


def _by_soundfile(content: bytes, limits: MediaLimits) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise RequestError(
            "this audio is no PCM wave file that can be read: send one, or install what reads others: pip install "
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
