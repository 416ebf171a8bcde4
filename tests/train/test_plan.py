from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
from saved import saved_pair
from transformers import PreTrainedTokenizerBase

from flashdraft.errors import ConfigError
from flashdraft.targets.load import load_target, load_tokenizer
from flashdraft.targets.target import Target
from flashdraft.train.data import Records
from flashdraft.train.distributed import World
from flashdraft.train.plan import choose_mask_token, draft_config, make_plan, row_length, split_records
from flashdraft.train.recipe import DraftRecipe, Recipe, parse_recipe


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, PreTrainedTokenizerBase]:
    saved = saved_pair(tmp_path_factory.mktemp("pair"))
    return load_target(saved.target), load_tokenizer(saved.target)


def answers(*tokens: int) -> Records:
    return Records.from_lists([([10, 11], [12, 13, *tokens])])


def test_a_token_made_to_be_a_mask_is_chosen_while_it_never_occurs(pair: tuple[Target, PreTrainedTokenizerBase]) -> None:
    target, tokenizer = pair
    assert tokenizer.convert_ids_to_tokens(choose_mask_token(None, answers(), tokenizer, target)) == "<mask>"
    other = choose_mask_token(None, answers(2), tokenizer, target)
    assert other not in {1, 2, 10, 11, 12, 13}
    assert other == len(tokenizer) - 1  # the rarest ordinary token: the last one merged


def test_a_named_mask_token_that_occurs_is_an_error(pair: tuple[Target, PreTrainedTokenizerBase]) -> None:
    target, tokenizer = pair
    assert choose_mask_token("<mask>", answers(), tokenizer, target) == 2
    assert choose_mask_token(40, answers(), tokenizer, target) == 40
    with pytest.raises(ConfigError, match=r"'<mask>' occurs 2 times in the data: leave out mask_token"):
        choose_mask_token("<mask>", answers(2, 2), tokenizer, target)
    with pytest.raises(ConfigError, match="eos, bos, pad or unk"):
        choose_mask_token("</s>", answers(), tokenizer, target)
    for unknown in ("<nothing>", 10**6, -1):
        with pytest.raises(ConfigError, match="no token of the target"):
            choose_mask_token(unknown, answers(), tokenizer, target)


def test_a_vocabulary_that_all_occurs_leaves_no_mask(pair: tuple[Target, PreTrainedTokenizerBase]) -> None:
    target, tokenizer = pair
    with pytest.raises(ConfigError, match="none can be the mask"):
        choose_mask_token(None, answers(*range(target.vocab_size)), tokenizer, target)


def test_sizes_come_from_the_recipe_or_else_from_the_target(pair: tuple[Target, PreTrainedTokenizerBase]) -> None:
    target, _ = pair
    recipe = DraftRecipe(num_hidden_layers=2, num_features=1, sliding_window=0, causal=True, block_size=4)
    c = draft_config(recipe, target, 2)
    assert (c.hidden_size, c.num_hidden_layers, c.windows, c.causal, c.block_size) == (48, 2, (None, None), (True, True), 4)
    assert c.target_layer_ids == (1,)
    assert draft_config(DraftRecipe(target_layer_ids=[2, 0], sliding_window=9), target, 2).windows == (9,) * 5
    assert draft_config(DraftRecipe(), target, 2).num_features == 2  # of three layers no more can be spread
    for count in (3, 9):
        with pytest.raises(ConfigError, match=f"{count} feature layers cannot be spread over 3 target layers: give"):
            draft_config(DraftRecipe(num_features=count), target, 2)


def test_the_split_is_by_prompt_and_stays_as_data_grow() -> None:
    records = tiny.make_records([(3, 9)] * 200)
    hashes = records.prompt_hashes
    twice = replace(records, prompt_hashes=np.where(np.arange(200) % 2, hashes, np.roll(hashes, -1)))  # two answers a prompt
    train, heldout = twice.split(0.1)
    assert len(train) + len(heldout) == 200
    assert not set(train.prompt_hashes.tolist()) & set(heldout.prompt_hashes.tolist())
    assert 8 <= len(heldout) <= 40
    first, _ = (part.prompt_hashes for part in records.select(np.arange(200) < 100).split(0.1))
    assert set(first.tolist()) <= set(records.split(0.1)[0].prompt_hashes.tolist())


def test_few_prompts_hold_out_some_and_many_no_more_than_are_measured() -> None:
    few = split_records(tiny.make_records([(3, 9)] * 60), Recipe(), "cpu")
    assert len(few.heldout) == len(few.often) == 8
    one = split_records(tiny.make_records([(3, 9)] * 30), parse_recipe({"eval": {"share": 0.001}}), "cpu")
    assert (len(one.train), len(one.heldout)) == (29, 1)
    assert len(split_records(tiny.make_records([(3, 9)]), Recipe(), "cpu").train) == 1
    many = split_records(tiny.make_records([(1, 2)] * 5000), Recipe(), "cpu")
    assert len(many.often) == 8
    assert len(many.heldout) == 32
    assert set(many.often.prompt_hashes.tolist()) <= set(many.heldout.prompt_hashes.tolist())
    none = split_records(tiny.make_records(), parse_recipe({"eval": {"share": 0}}), "cpu")
    assert (len(none.train), len(none.heldout)) == (len(tiny.SIZES), 0)


def test_rows_are_shared_by_all_processes_and_shrink_with_the_data(tiny_target: Target) -> None:
    records = tiny.make_records([(20, 40)] * 64)
    recipe = parse_recipe({"train": {"seq_length": 64}})
    plan = make_plan(recipe, tiny_target, tiny.make_draft(), records, World())
    assert (plan.rows, plan.micro_rows, plan.anchors, plan.config.steps) == (4, 4, 4, 100)
    assert plan.config.loss.gamma == 2.0
    assert make_plan(recipe, tiny_target, tiny.make_draft(), records, World(0, 3)).rows == 3
    small = make_plan(recipe, tiny_target, tiny.make_draft(), tiny.make_records([(20, 40)] * 3), World())
    assert small.rows == 1
    timed = parse_recipe({"train": {"hours": 0.5, "seq_length": 64}})
    hours = make_plan(timed, tiny_target, tiny.make_draft(), records, World())
    assert (hours.config.steps, hours.config.max_seconds) == (None, 1800.0)


def test_rows_longer_than_the_target_knows_positions_are_refused(tiny_target: Target) -> None:
    assert row_length(Recipe(), tiny_target) == 128
    with pytest.raises(ConfigError, match="seq_length 256 is more than the 128 positions of the target"):
        row_length(parse_recipe({"train": {"seq_length": 256}}), tiny_target)
    with pytest.raises(ConfigError, match="anchors must be at most seq_length, got 200 for 128"):
        row_length(parse_recipe({"train": {"anchors": 200}}), tiny_target)
