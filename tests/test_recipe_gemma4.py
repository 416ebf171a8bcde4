"""The recipe of the reference pair plans the reference draft, to the parameter, for a Gemma 4 of 42 layers."""

from __future__ import annotations

import pytest
import torch
from answers import counting, write_answers
from families import make
from gemma4_chat import gemma4_pair
from gemma4_e4b import RECIPE, planned
from transformers import AutoTokenizer

from flashdraft.checkpoint import read_config
from flashdraft.draft import DFlashDraft, count_parameters
from flashdraft.errors import ConfigError
from flashdraft.train.distributed import World
from flashdraft.train.identity import tokenizer_hash
from flashdraft.train.prepare import Options, prepare
from flashdraft.train.recipe import read_recipe


def test_the_draft_it_plans_has_the_parameters_of_the_reference():
    config = planned()
    assert config.with_(has_own_lm_head=True) == read_config(RECIPE.parent / "reference")
    counted = []
    for own_head in (False, True):
        with torch.device("meta"):
            counted.append(count_parameters(DFlashDraft(config.with_(has_own_lm_head=own_head)))["all"])
    assert counted == [360_480_000, 1_031_568_640]
    assert f"{counted[0]:,} parameters are trained" in RECIPE.read_text()
    assert f"{counted[1]:,}." in RECIPE.read_text()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Gemma 4 of 42 tiny layers, 18 of them sharing keys and values, with its tokenizer on disk, and answers of it."""
    folder = tmp_path_factory.mktemp("gemma")
    tokenizer = AutoTokenizer.from_pretrained(gemma4_pair(folder).target)
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(42)]
    sizes = dict(num_hidden_layers=42, layer_types=kinds, num_kv_shared_layers=18, hidden_size=32, intermediate_size=32)
    vocab = dict(vocab_size=len(tokenizer), vocab_size_per_layer_input=len(tokenizer), max_position_embeddings=8192)
    make("gemma4", **sizes, **vocab).save_pretrained(folder / "target")
    write_answers(folder / "answers", counting(60), tokenizer_hash(tokenizer))
    return folder


def test_training_accepts_it_for_a_gemma_4_of_42_layers(small):
    options = Options(
        small / "answers", small / "out", str(small / "target"), RECIPE, dtype="float32", device="cpu", dry_run=True
    )
    job = prepare(options, read_recipe(RECIPE), World())
    config, plan = job.draft.config, job.plan
    assert (config.target_layer_ids, config.mask_token_id, config.block_size) == ((5, 11, 17, 23, 35), 4, 8)
    assert (config.windows, config.causal, config.has_own_lm_head) == ((1024,) * 5, (False,) * 5, False)
    assert [job.target.layer_specs[i].window for i in config.target_layer_ids] == [None] * 5
    assert (plan.seq_length, plan.rows, plan.anchors) == (8192, 16, 2048)
    assert plan.config.learning_rate == 6e-4


def test_answers_that_hold_the_mask_token_are_refused_by_its_name(small, tmp_path):
    tokens = counting(60)
    tokens[0] = (tokens[0][0], [4, *tokens[0][1]])
    write_answers(tmp_path / "answers", tokens, tokenizer_hash(AutoTokenizer.from_pretrained(small / "target")))
    options = Options(tmp_path / "answers", tmp_path / "out", str(small / "target"), RECIPE, dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="mask_token 4 occurs 1 times in the data"):
        prepare(options, read_recipe(RECIPE), World())
