"""The configuration of a draft of a few kilobytes, and the recipe of one."""

from flashdraft.draft import DFlashConfig

TINY = DFlashConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    num_target_layers=6,
    target_layer_ids=(1, 4),
    mask_token_id=3,
    rope_theta=5e5,
    max_position_embeddings=777,
)

# The beginning of a recipe, [train] to be gone on with.
TINY_RECIPE = """
[draft]
num_hidden_layers = 1
intermediate_size = 32
block_size = 4
sliding_window = 16

[train]
rows = 2
seq_length = 64
anchors = 24
learning_rate = 5e-3
"""
