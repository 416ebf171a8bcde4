"""Images and audio of a target that takes them: its own towers make the embeddings of the positions that stand for them.

Gemma 4: an image becomes up to 280 positions between a begin and an end token, audio one position for 40 ms. What the layers
are given there (per-layer inputs of the padding token) and who sees whom is the model's own; see Target.forward.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from flashdraft.errors import CheckpointError, ConfigError, FlashdraftError, RequestError
from flashdraft.targets.quiet import quiet

Kind = Literal["image", "audio"]


@dataclass(frozen=True)
class Marks:
    """The tokens around one kind of media: placeholders stand between begin and end."""

    begin: int
    placeholder: int
    end: int


@dataclass(frozen=True)
class Encoded:
    """One image or audio clip: embeddings [length, H] of its placeholders, on the host, and `key`, the name of its content.

    whole: layers that see whole images see all of it from each of its positions.
    """

    kind: Kind
    key: str
    embeddings: Tensor
    whole: bool


class MediaEncoder:
    """The towers of a Gemma 4 model behind its processors, which are loaded with the first request that needs them."""

    MAX_SAMPLES = 480_000  # of a clip: the feature extractor would cut off what is behind, without a word
    MIN_SAMPLES = 640  # of a clip: a placeholder's
    KEPT_BYTES = 256 << 20  # of embeddings: each turn of a conversation sends its media again

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._inner: Any = model.model
        self.marks: dict[Kind, Marks] = {}
        if config.vision_config is not None:
            self.marks["image"] = Marks(config.boi_token_id, config.image_token_id, config.eoi_token_id)
        if config.audio_config is not None:
            self.marks["audio"] = Marks(config.boa_token_id, config.audio_token_id, config.eoa_token_index)
        # In a prompt these stand for media alone: the model takes the embedding of padding there.
        self.placeholders = frozenset((config.image_token_id, config.audio_token_id, config.video_token_id))
        self.padding = int(config.get_text_config().pad_token_id)
        self.sees_whole_images = config.get_text_config().use_bidirectional_attention == "vision"
        self.image_processor: Any = None
        self.feature_extractor: Any = None
        self.load: Callable[[Kind], Any] | None = None  # of a processor, from where the target came
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Encoded] = OrderedDict()  # by key, the last used at the end
        self._kept_bytes = 0

    @staticmethod
    def of(model: PreTrainedModel) -> MediaEncoder | None:
        """The encoder of a model that takes media, None for a text model and for families whose media are not served."""
        config = model.config
        if config.model_type != "gemma4" or (config.vision_config is None and config.audio_config is None):
            return None
        return MediaEncoder(model)

    @property
    def modules(self) -> list[nn.Module]:
        """The towers, and what turns their output into embeddings."""
        names = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
        return [module for name in names if (module := getattr(self._inner, name)) is not None]

    @property
    def longest_whole_image(self) -> int:
        """Positions of an image that sees itself whole, at most: 0 where none does, or where none can be encoded."""
        if not self.sees_whole_images:
            return 0
        try:
            return int(self._processor("image").max_soft_tokens)
        except FlashdraftError:  # which an image is refused with
            return 0

    @property
    def sampling_rate(self) -> int:
        """Samples a second that encode takes."""
        return int(self._processor("audio").sampling_rate)

    def _processor(self, kind: Kind) -> Any:
        name = "image_processor" if kind == "image" else "feature_extractor"
        with self._lock:
            if getattr(self, name) is None:
                if kind not in self.marks:
                    raise RequestError(f"this target takes no {kind}: leave it out")
                if self.load is None:
                    raise RequestError(f"this target came without its {name.replace('_', ' ')}: load it with load_target")
                setattr(self, name, self.load(kind))
        return getattr(self, name)

    @torch.no_grad()
    def encode(self, kind: Kind, content: Any) -> Encoded:
        """An RGB image (Pillow's), or mono samples float32 [S] in -1..1 at `sampling_rate`.

        Raises RequestError for what the target does not take, and where its processor refuses.
        """
        processor = self._processor(kind)
        shape = content.size if kind == "image" else content.shape
        key = hashlib.blake2b(f"{kind} {shape} ".encode() + content.tobytes(), digest_size=16).hexdigest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        try:
            inputs = processor([content], return_tensors="pt")
        except ValueError as error:  # of an image that is much longer than wide, say
            raise RequestError(f"the target's processor refuses this {kind}: {shorten(str(error), 200)}") from error
        text = self._inner.get_input_embeddings().weight
        try:
            embeddings = self._encode(kind, {name: value.to(text.device) for name, value in inputs.items()}).to(text.dtype)
        except torch.OutOfMemoryError as error:
            raise RequestError(
                f"the GPU has no memory left to encode this {kind}: lower gpu_memory_utilization, or send a smaller one"
            ) from error
        if not embeddings.isfinite().all():
            raise RequestError(f"the target's encoder gives numbers for this {kind} that are not finite: leave it out")
        # Kept in host memory: many requests may wait.
        embeddings = embeddings.cpu().pin_memory() if embeddings.is_cuda else embeddings
        encoded = Encoded(kind, key, embeddings, whole=kind == "image" and self.sees_whole_images)
        self._keep(encoded)
        return encoded

    def _keep(self, encoded: Encoded) -> None:
        with self._lock:
            if encoded.key in self._kept:
                return
            self._kept[encoded.key] = encoded
            self._kept_bytes += encoded.embeddings.nbytes
            while self._kept_bytes > self.KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.embeddings.nbytes

    def _encode(self, kind: Kind, inputs: dict[str, Tensor]) -> Tensor:
        if kind == "image":
            found = self._inner.get_image_features(inputs["pixel_values"], inputs["image_position_ids"], return_dict=True)
            return found.pooler_output[0]
        found = self._inner.get_audio_features(inputs["input_features"], inputs["input_features_mask"], return_dict=True)
        return found.pooler_output[found.attention_mask]


def load_processor(kind: Kind, where: dict[str, Any]) -> Any:
    """What prepares media of a kind for a target, from the place of its files. Raises CheckpointError if it is not there."""
    what = "image processor" if kind == "image" else "feature extractor"
    if kind == "image":
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise ConfigError("images need Pillow: pip install 'flashdraft[media]'") from error
    try:
        with quiet():  # looked up here, as importing them takes long; by name, for the automatic class wants torchvision
            found = transformers.Gemma4ImageProcessorPil if kind == "image" else transformers.Gemma4AudioFeatureExtractor
            return found.from_pretrained(**where)
    except Exception as error:  # bad files surface as OSError, ValueError, KeyError, TypeError and more
        raise CheckpointError(
            f"{where['pretrained_model_name_or_path']}: no usable {what} ({shorten(str(error), 100)}): add its "
            f"processor_config.json, or leave out what is {kind}"
        ) from error
