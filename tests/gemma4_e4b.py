"""The full shape of Gemma 4 E4B's text model, and the draft that its recipe makes for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from flashdraft.draft import DFlashConfig
from flashdraft.train.plan import draft_config
from flashdraft.train.recipe import read_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "gemma4-e4b.toml"
E4B = dict(
    hidden_size=2560,
    intermediate_size=10240,
    num_hidden_layers=42,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    global_head_dim=512,
    num_kv_shared_layers=18,
    sliding_window=512,
    hidden_size_per_layer_input=256,
    vocab_size=262144,
    final_logit_softcapping=30.0,
)


def planned() -> DFlashConfig:
    """The draft that the recipe makes for the full shape."""
    target, recipe = SimpleNamespace(hidden_size=2560, vocab_size=262_144, num_layers=42), read_recipe(RECIPE)
    assert isinstance(recipe.draft.mask_token, int)
    return draft_config(recipe.draft, target, recipe.draft.mask_token)  # type: ignore[arg-type]
