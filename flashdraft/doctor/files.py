"""What a draft's files say of it without running it: whom it was trained for, with which configuration it was saved."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from flashdraft import builtin
from flashdraft.checkpoint import CONFIG, STAMP, draft_tensors, load_draft, locate, weight_files
from flashdraft.config_json import config_sha256, read_json
from flashdraft.doctor.variations import Variation, changed, norms
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.speculators import Json, is_speculators

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Files:
    """A draft's directory. `training`: its training.json, {} without one; `stamp`: hash of the configuration saved with it."""

    folder: Path
    raw: Json
    names: frozenset[str]  # of its tensors
    stamp: str | None
    training: dict[str, Any]

    @classmethod
    def of(cls, draft: str | Path, revision: str | None = None) -> Files:
        """Raises CheckpointError where there is no draft."""
        folder = builtin.draft_path() if draft == builtin.NAME else locate(draft, revision)
        raw, stamp = read_json(folder / CONFIG), None
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                stamp = stamp or (opened.metadata() or {}).get(STAMP)
        try:
            training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            training = None
        names = frozenset(draft_tensors(folder))
        return cls(folder, raw, names, stamp, training if isinstance(training, dict) else {})

    @property
    def sections(self) -> list[Json]:
        """The parts of config.json that may hold a key: the top level, and those nested in it."""
        return [self.raw, *(section for section in self.raw.values() if isinstance(section, dict))]

    @property
    def windows(self) -> list[int]:
        """Named in config.json, in force or not."""
        found = [s.get(key) for key in ("sliding_window", "swa_window_size") for s in self.sections]
        return list(dict.fromkeys(w for w in found if type(w) is int and w > 0))

    def stated(self, key: str) -> str | None:
        value = self.training.get(key)
        return value if isinstance(value, str) else None

    @property
    def heldout(self) -> dict[str, Any]:
        value = self.training.get("heldout")
        return value if isinstance(value, dict) else {}

    @property
    def trained_length(self) -> float | None:
        """The acceptance length on held-out answers after training."""
        value = self.heldout.get("acceptance_length")
        return float(value) if isinstance(value, int | float) else None

    @property
    def trained_modes(self) -> set[str]:
        """Of thinking: on, off or both; empty where nobody knows."""
        value = self.heldout.get("by_thinking")
        return {"on", "off"} & set(value) if isinstance(value, dict) else set()

    @property
    def head_flag(self) -> bool | None:
        """has_own_lm_head, where it contradicts the weights: readers go by it, and run with another head or a random one."""
        flag = next((s["has_own_lm_head"] for s in self.sections if isinstance(s.get("has_own_lm_head"), bool)), None)
        tied = any(s.get("tie_word_embeddings") for s in self.sections) and "embed_tokens.weight" in self.names
        return flag if isinstance(flag, bool) and not tied and flag != (HEAD in self.names) else None

    def load(self) -> DFlashDraft:
        """The draft, whichever configuration its weights were saved with, and with a head where its weights have one."""
        if self.head_flag is None:
            return load_draft(self.folder, stamped=False).requires_grad_(False)
        raw = json.loads(json.dumps(self.raw))
        for section in (raw, *(value for value in raw.values() if isinstance(value, dict))):
            if "has_own_lm_head" in section:
                section["has_own_lm_head"] = not self.head_flag
        with tempfile.TemporaryDirectory() as mended:
            for file in self.folder.iterdir():
                if file.suffix in (".safetensors", ".json") and file.name != CONFIG:
                    (Path(mended) / file.name).symlink_to(file.resolve())
            (Path(mended) / CONFIG).write_text(json.dumps(raw), encoding="utf-8")
            return load_draft(mended, stamped=False).requires_grad_(False)

    def is_stamped_otherwise(self, config: DFlashConfig) -> bool:
        return self.stamp is not None and self.stamp != config_sha256(config)

    def as_stamped(self, config: DFlashConfig, variations: Sequence[Variation]) -> tuple[Variation, ...]:
        """The one to three variations that make config.json what the weights were saved with; () where none do."""
        own = [v for v in variations if v.config and v.weights is None]
        for count in (1, 2, 3):
            for forms in combinations(own, count):
                if len({v.cause for v in forms}) == count and config_sha256(changed(config, forms)) == self.stamp:
                    return forms
        return ()


def suspicious_norms(draft: DFlashDraft) -> list[str]:
    """Norms whose weights are all exactly 1 where most others' are not: as a reader leaves those it did not find."""
    found = {name: bool((norm.weight == 1).all()) for name, norm in norms(draft).items()}
    flat = [name for name, ones in found.items() if ones]
    return flat if 2 * len(flat) < len(found) else []


def empty_products(draft: DFlashDraft) -> list[str]:
    """Linears whose weights are all 0."""
    linears = {n: m for n, m in draft.named_modules() if isinstance(m, torch.nn.Linear) and isinstance(m.weight, torch.Tensor)}
    return [name for name, module in linears.items() if not module.weight.any()]


def notes(files: Files, config: DFlashConfig, layers: int, positions: int) -> list[str]:
    """What is odd and no cause by itself. layers, positions: of the target."""
    found = []
    if config.num_target_layers != layers and not is_speculators(files.raw):
        found.append(f"config.json says that the target has {config.num_target_layers} layers, and it has {layers}")
    if config.max_position_embeddings < positions:
        found.append(
            f"contexts longer than {config.max_position_embeddings:,} tokens lie beyond the draft's max_position_embeddings: "
            "readers that tabulate positions accept nothing there"
        )
    keys = {key for section in files.sections for key in section}
    rope = "rope_theta" in keys or any("rope_theta" in str(s.get("rope_parameters")) for s in files.sections)
    causal = keys & {"causal", "is_causal"} or is_speculators(files.raw)
    absent = [n for n, there in {"head_dim": "head_dim" in keys, "causal": causal, "rope_theta": rope}.items() if not there]
    said = {s[key] for s in files.sections for key in ("causal", "is_causal") if isinstance(s.get(key), bool)}
    if len(said) > 1:
        found.append("config.json says causal in one place and bidirectional in another: readers differ in which one they take")
    if absent:
        found.append(f"config.json does not say {', '.join(absent)}: readers take defaults that differ between them; write it")
    return found
