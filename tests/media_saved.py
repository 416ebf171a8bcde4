"""A tiny Gemma 4 with its towers on disk: weights, tokenizer, chat template and processors, as in a hub directory."""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parent / "targets"))

from multimodal import IDS, feature_extractor, image_processor, media_model

MARKS = ("<|image>", "<|image|>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>")  # in the order of IDS
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}<|{{ p['type'] }}|>{% endif %}{% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def saved_media_target(folder: Path, bidirectional: bool = False) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=IDS[0], special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3, "zebra quartz vow"] * 3, trainer)
    spare = [f"<unused{i}>" for i in range(IDS[0] - tokenizer.get_vocab_size())]
    tokenizer.add_tokens(spare)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATE)
    fast.add_special_tokens({"additional_special_tokens": list(MARKS)})
    assert fast.convert_tokens_to_ids(list(MARKS)) == list(IDS)
    media_model(bidirectional).save_pretrained(folder)
    fast.save_pretrained(folder)
    parts = {"image_processor": image_processor(), "feature_extractor": feature_extractor()}
    text = {name: json.loads(part.to_json_string()) for name, part in parts.items()}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Gemma4Processor", **text}))
    return folder


def encoded(image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    """A PCM wave file of samples in -1..1 ([S] or [S, channels])."""
    if width == 1:
        data = np.round(samples * 127 + 128).clip(0, 255).astype(np.uint8).tobytes()
    else:
        whole = np.round(samples * 2.0 ** (8 * width - 1)).clip(-(2.0 ** (8 * width - 1)), 2.0 ** (8 * width - 1) - 1)
        wide = whole.astype("<i8").reshape(-1, 1).view(np.uint8)
        data = wide[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(data)
    return file.getvalue()
