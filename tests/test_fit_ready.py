"""What a fit writes beside its draft."""

from __future__ import annotations

from flashdraft.fit.ready import MOST_POINTS, card, curves
from flashdraft.train.commands_synthesize import Where

GROUP = {"requests": 12, "acceptance_length": 2.125, "over_steps": 2.0}
FIGURES = {
    "draft_parameters": 5_938_816,
    "heldout": {
        **GROUP,
        "by_position": [0.5, 0.25],
        "by_category": {"all": GROUP, "": GROUP, "code": GROUP | {"acceptance_length": 3.5}},
        "by_language": {"all": GROUP, "en": GROUP},
        "by_thinking": {"all": GROUP, "on": GROUP},
    },
    "speed": {
        "setup": {"device": "a CPU", "dtype": "bfloat16", "torch": "2.13.0", "sampling": {"temperature": 0.6}},
        "all": {
            "answers": 8,
            "tokens": 1024,
            "tokens_per_second_on": 44.0,
            "tokens_per_second_off": 22.0,
            "speedup": 2.0,
            "acceptance_length": 2.25,
            "identical": 8,
        },
    },
    "data": {"records": 1000, "records_trained_on": 980, "answer_tokens": 123_456},
    "training": {"steps": 400, "epochs": 3.06},
    "prompts": {"hash": "0123456789abcdef" * 2, "count": 1100},
    "answers": {"sampling": {"temperatures": [0.6, 1.0]}},
    "fit": {"seconds": {"answers": 3000.0, "training": 4200.0}},
    "command": "flashdraft fit org/name --prompts p.jsonl --output DRAFT --hours 2",
}


def test_the_card_has_the_figures_and_how_to_use_the_draft() -> None:
    text = card(FIGURES, {"block_size": 8}, Where(target="org/name"), "DRAFT")
    front = text.split("---")[1]
    assert "base_model: org/name" in front
    assert "tags: [dflash, speculative-decoding]" in front
    for words in (
        "# DRAFT: a DFlash draft for org/name",
        "next 7 tokens",
        "| category (none) | 12 | 2.12 |",
        "| category code | 12 | 3.50 |",
        "| thinking on | 12 | 2.12 |",
        "**44.0 tokens/s** with this draft, 2.25 tokens a step, 22.0 without, ratio 2.00; 8 of 8 texts identical",
        "flashdraft generate --target org/name --draft DIR --compare",
        """--speculative-config '{"method": "dflash", "model": "DIR", "num_speculative_tokens": 7}'""",
        'llm = LLM("org/name", draft="DIR")',
        FIGURES["command"],
        "in 2 h 00 min: 1,000 answers",
        "temperature 0.6, 1;",
    ):
        assert words in text


def test_the_card_of_a_local_target_names_no_model_of_the_hub(tmp_path) -> None:
    assert "base_model" not in card(FIGURES, {"block_size": 8}, Where(target=str(tmp_path)), "DRAFT")
    builtin = card(FIGURES, {"block_size": 8}, Where(), "DRAFT")
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in builtin
    assert "flashdraft chat --draft DIR" in builtin


def test_a_card_of_a_draft_that_proposed_nothing_has_no_length() -> None:
    speed = {**FIGURES["speed"], "all": {**FIGURES["speed"]["all"], "acceptance_length": None}}
    assert "**44.0 tokens/s** with this draft, 22.0 without" in card(
        FIGURES | {"speed": speed}, {"block_size": 4}, Where(), "DRAFT"
    )


def test_long_curves_are_thinned() -> None:
    rows = [{"step": i, "loss": 1 / (i + 1), "expected_al": 1.0} for i in range(1000)]
    held = [{"step": 500, "heldout": {"over_steps": 1.5}, "final": False}]
    found = curves([*rows, *held])
    assert 100 <= len(found["loss"]) <= MOST_POINTS
    assert found["loss"][0] == [0, 1.0]
    assert found["heldout_al"] == [[500, 1.5]]
