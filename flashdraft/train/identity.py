"""What data belongs to: the hash of a tokenizer, kept with the answers it made and compared before a draft learns from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from textwrap import shorten
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flashdraft.errors import CheckpointError
from flashdraft.targets.target import Target
from flashdraft.train.data import shard_paths
from flashdraft.train.shards import MEND

METADATA = b"flashdraft"  # key of the shards' schema metadata: JSON with `tokenizer_hash`


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hexadecimal digits of blake2b over the vocabulary (sorted by id) and the chat template: what decides prompt ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    content = json.dumps([vocabulary, getattr(tokenizer, "chat_template", None)], ensure_ascii=True, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def target_hash(target: Target) -> str:
    """weights_hash of a target, of the whole one where this process has a part of it."""
    return target.weights_hash or weights_hash(target.model)


def weights_hash(model: PreTrainedModel) -> str:
    """32 hexadecimal digits over the first values of every weight: a fine-tuned target has another than its base."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in model.named_parameters():
        state.update(name.encode())
        state.update(tensor.detach().flatten()[:64].cpu().float().numpy().tobytes())
    return state.hexdigest()


def headers(directory: Path) -> dict[Path, dict[str, Any]]:
    """What each shard of a directory says of the target that made it: names and hashes. Raises CheckpointError."""
    import pyarrow.parquet as pq

    found = {}
    for path in shard_paths(directory):
        try:
            header = json.loads((pq.read_schema(path).metadata or {}).get(METADATA, b"{}"))
        except (ValueError, RecursionError, OSError) as error:  # of pyarrow, for a file that is not parquet, too
            raise CheckpointError(f"{path}: its metadata cannot be read ({shorten(str(error), 120)}): {MEND}") from error
        hashes = [value for name, value in header.items() if name.endswith("_hash")] if isinstance(header, dict) else [0]
        if not all(value is None or isinstance(value, str) for value in hashes):
            raise CheckpointError(f"{path}: its metadata is not what `flashdraft synthesize` writes: {MEND}")
        found[path] = header
    return found


def are_of_others(directory: Path, weights: str) -> bool:
    """Whether a shard of the directory says that it was made by other weights than those of this target_hash."""
    return any(header.get("target_hash") not in (None, weights) for header in headers(directory).values())


def check_tokenizer(directory: Path, expected: str) -> bool:
    """Whether the shards of a directory say which tokenizer made them.

    Raises CheckpointError that names the first shard made for another tokenizer than the one of hash `expected`.
    """
    stated = True
    for path, header in headers(directory).items():
        found = header.get("tokenizer_hash")
        stated = stated and found is not None
        if found is not None and found != expected:
            raise CheckpointError(
                f"{path} was made for another tokenizer (hash {str(found)[:12]}, the target's is {expected[:12]}): take "
                "answers of this target, made by `flashdraft synthesize`"
            )
    return stated
