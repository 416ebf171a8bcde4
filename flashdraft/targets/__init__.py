"""Targets: any transformers causal LM, through one adapter."""

from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.targets.target import LayerSpec, Target

__all__ = ["LayerSpec", "Target", "load_target", "load_tokenizer"]
