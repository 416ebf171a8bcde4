"""A tiny random Gemma 4 with vision and audio towers, its processors, and what transformers computes for prompts with media."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from families import _GEMMA4, _SIZES, VOCAB
from PIL import Image
from torch import Tensor
from transformers import Gemma4AudioFeatureExtractor, Gemma4Config, Gemma4ForConditionalGeneration, PreTrainedModel
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from flashdraft.targets.target import Target

BOI, IMAGE, EOI, AUDIO, BOA, EOA, VIDEO = IDS = range(VOCAB - 7, VOCAB)
_IDS = dict(
    boi_token_id=BOI,
    image_token_id=IMAGE,
    eoi_token_id=EOI,
    audio_token_id=AUDIO,
    boa_token_id=BOA,
    eoa_token_index=EOA,
    video_token_id=VIDEO,
)
_VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    patch_size=4,
    pooling_kernel_size=2,
    position_embedding_size=320,
    initializer_range=0.2,
)
_MEL = 16
_AUDIO = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    subsampling_conv_channels=[_MEL, 4],
    output_proj_dims=24,
    initializer_range=0.2,
)


def media_model(bidirectional: bool = False, dtype: torch.dtype = torch.float32, **text: Any) -> PreTrainedModel:
    """Always the same weights. bidirectional: images see themselves whole in sliding layers, as in the larger Gemma 4."""
    sizes = copy.deepcopy({**_SIZES, **_GEMMA4}) | dict(pad_token_id=0, **text)
    if bidirectional:
        sizes["use_bidirectional_attention"] = "vision"
    config = Gemma4Config(text_config=sizes, vision_config=_VISION, audio_config=_AUDIO, **_IDS)
    torch.manual_seed(0)
    model = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def image_processor() -> Gemma4ImageProcessorPil:
    return Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4, pooling_kernel_size=2)


def feature_extractor() -> Gemma4AudioFeatureExtractor:
    return Gemma4AudioFeatureExtractor(feature_size=_MEL)


def media_target(bidirectional: bool = False, dtype: torch.dtype = torch.float32, **text: Any) -> Target:
    target = Target(media_model(bidirectional, dtype, **text), check=False)
    assert target.media is not None
    target.media.image_processor, target.media.feature_extractor = image_processor(), feature_extractor()
    return target


def picture(seed: int, width: int = 40, height: int = 56) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sound(seed: int, seconds: float = 0.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, int(16_000 * seconds)).astype(np.float32)


@torch.no_grad()
def own_media_forward(model: PreTrainedModel, ids: list[int], images: list[Any], sounds: list[np.ndarray]):
    """transformers' own forward of a prompt: logits [T, V], every layer's output [T, layers, H]."""
    inputs: dict[str, Any] = dict(input_ids=torch.tensor([ids]))
    inputs["mm_token_type_ids"] = torch.tensor([[1 if i == IMAGE else 3 if i == AUDIO else 0 for i in ids]])
    if images:
        found = image_processor()(images, return_tensors="pt")
        inputs |= {name: found[name] for name in ("pixel_values", "image_position_ids")}
    if sounds:
        inputs |= dict(feature_extractor()(sounds, return_tensors="pt"))
    last: list[Tensor] = []
    layers = model.get_decoder().layers
    hook = layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out))
    try:
        out = model(**inputs, use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    hidden = [*out.hidden_states[1 : len(layers)], last[0]]
    return out.logits[0], torch.stack([h[0] for h in hidden], 1)
