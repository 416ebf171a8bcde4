"""What cards make of bad input: other checkpoints, damaged files, missing fields, hostile names, and words of people."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from carding import TRAINING, benched, card_of, counted_only, front_of, results, shape_of, tiny_draft, tokens_of, written
from markdown_it import MarkdownIt

from flashdraft.card.facts import FACTS, read_facts, template
from flashdraft.card.markdown import code, decimal, escape, fence, number, table
from flashdraft.card.write import CardOptions, is_handwritten, run_card, write_card
from flashdraft.errors import CheckpointError, ConfigError

HOSTILE = 'a|b\n---\n# <script>alert("x")</script> ```\n{{ 1 }} [x](javascript:1) *b* _i_ \\ " \' \u202e end'
LEAVES = {"null": None, "nan": float("nan"), "list": [], "hostile": HOSTILE, "true": True, "huge": 10**400}
CHECKED = ("license", "license_link", "repo", "base_model")  # facts of which anything else is refused


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny_draft(tmp_path / "draft", TRAINING)


def change(found: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


def replaced(value: Any, leaf: Any) -> Any:
    """The same JSON with another thing in the place of every number and text."""
    if isinstance(value, dict):
        return {key: replaced(one, leaf) for key, one in value.items()}
    return [replaced(one, leaf) for one in value] if isinstance(value, list) else leaf


def test_what_a_template_asks_for_is_no_fact(tmp_path: Path) -> None:
    file = tmp_path / "facts.toml"
    file.write_text('personal_data = "<which, or how their absence is known>"')
    with pytest.raises(ConfigError, match="personal_data still holds what is to be filled in"):
        read_facts(file)
    claims = {"yes", "no", "none", "none known", "not applicable", "global"}
    assert [fact.name for fact in FACTS if fact.example.lower().rstrip(".") in claims] == []


def test_results_of_another_checkpoint_are_refused(draft: Path, tmp_path: Path) -> None:
    run = written(tmp_path / "run", change(results(draft), "provenance", "draft_hashes", "DRAFT", value="0" * 32))
    with pytest.raises(CheckpointError, match=r"results.json measured another checkpoint \(DRAFT\) than .*: measure this one"):
        card_of(draft, {}, run)


def test_a_card_and_reports_beside_it_make_no_other_checkpoint(draft: Path, tmp_path: Path) -> None:
    run = written(draft / "eval", results(draft))
    written(draft, "{}", "quantization.json")
    write_card(draft)
    assert "| MT-Bench | `main` |" in card_of(draft, {}, run).text
    with (draft / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x11")
    with pytest.raises(CheckpointError, match="measured another checkpoint"):
        card_of(draft, {}, run)


def test_what_an_endpoint_served_is_the_publishers_word_and_no_entry_of_the_hub(draft: Path, tmp_path: Path) -> None:
    card = card_of(draft, {}, written(tmp_path / "run", counted_only(draft)))
    for words in (
        "| MT-Bench | not recorded | greedy, 16 at once | 2.75 (over all steps (vLLM)) | - | - | 2.50 |",
        "do not record which files were measured",
        "Acceptance is from the server's counters.",
        "| **all, over all steps (vLLM)** | 20 | 1 | 2.75 | - |",
        "vllm 0.31.0, a device that is not recorded",
    ):
        assert words in card.text
    assert "model-index" not in front_of(card.text)


def test_an_incomplete_run_is_said_and_is_no_entry_of_the_hub(draft: Path, tmp_path: Path) -> None:
    text = card_of(draft, {}, written(tmp_path / "run", results(draft, complete=False, left=12))).text
    assert "**Incomplete: 12 answers are missing.**" in text
    assert "| MT-Bench (incomplete) |" in text
    assert "model-index" not in front_of(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no .*results.json: give the directory that `flashdraft eval` wrote"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", r"not what `flashdraft eval` writes \(schema 1\)"),
        ('{"schema": 2, "drafts": [], "suite": {}}', "not what `flashdraft eval` writes"),
        ('{"schema": 1, "drafts": [], "suite": {}}', r"measured another checkpoint \(no draft\)"),
    ],
)
def test_what_eval_did_not_write_is_one_sentence(draft: Path, tmp_path: Path, content: str | None, message: str) -> None:
    run = tmp_path / "run" if content is None else written(tmp_path / "run", content)
    with pytest.raises(CheckpointError, match=message):
        card_of(draft, {}, run / "results.json" if content is None else run)


@pytest.mark.parametrize("field", ["suite", "settings", "drafts", "provenance"])
@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_fields_that_are_missing_or_make_no_sense_leave_a_card(draft: Path, tmp_path: Path, field: str, leaf: Any) -> None:
    found = results(draft)
    found[field] = replaced(found[field], leaf)
    found["drafts"][0]["name"] = "DRAFT"
    found["provenance"]["draft_hashes"] = results(draft)["provenance"]["draft_hashes"]
    card = card_of(draft, {}, written(tmp_path / "run", found))
    front_of(card.text)
    assert not re.search(r"\b(nan|inf|None)\b", card.text), "what is none is not printed"
    assert shape_of(card.text)[:3] == ["h1", "h2", "h3"]


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_training_file_of_anything_leaves_a_card(draft: Path, leaf: Any) -> None:
    (draft / "training.json").write_text(json.dumps(replaced(TRAINING, leaf)))
    (draft / "quantization.json").write_text(json.dumps({"acceptance": [leaf], "bytes": {"main": leaf}, "layers": leaf}))
    card = card_of(draft)
    assert front_of(card.text)["library_name"] == "flashdraft"


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_a_benchmark_of_anything_leaves_a_card_and_another_drafts_is_refused(draft: Path, tmp_path: Path, leaf: Any) -> None:
    found = benched(draft)
    found["workloads"] = [*replaced(found["workloads"], leaf), leaf]
    card = card_of(draft, bench=[written(tmp_path / "run", found, "bench.json")])
    assert not re.search(r"\b(nan|inf|None)\b", card.text)
    found["provenance"]["draft_hash"] = "0" * 32
    with pytest.raises(CheckpointError, match=r"bench.json measured another checkpoint"):
        card_of(draft, bench=[written(tmp_path / "run", found, "bench.json")])
    with pytest.raises(CheckpointError, match=r"not what `flashdraft bench` writes"):
        card_of(draft, bench=[written(tmp_path / "other", {"schema": 1}, "bench.json")])


def test_hostile_words_change_no_structure(draft: Path, tmp_path: Path) -> None:
    def both(word: str) -> tuple[str, list[str]]:
        found = results(draft, word)
        one = found["drafts"][0]
        one["by_category"] = {word: one["by_category"]["coding"], "b": one["by_category"]["writing"]}
        found["provenance"] |= {"device": word, "engine": word, "started": word, "torch": word}
        given = {fact.name: word for fact in FACTS if fact.kind == "text" and fact.name not in CHECKED}
        given |= {"references": [word], "limitations": [word], "training_data": [{"name": word, "link": word}]}
        given |= {"license": "mit"}
        training = TRAINING | {"command": word, "device": word, "started_from": word, "versions": {word: word}}
        (draft / "training.json").write_text(json.dumps(training))
        text = card_of(draft, given, written(tmp_path / "run", found)).text
        return text, shape_of(text)

    harmless, expected = both("word")
    hostile, shape = both(HOSTILE)
    assert shape == expected
    assert "<script" not in MarkdownIt("commonmark").enable("table").render(hostile.split("\n---\n", 1)[1])
    assert not [t for t in tokens_of(hostile) for c in t.children or () if c.type == "link_open" and "java" in c.attrs["href"]]
    assert front_of(hostile).keys() == front_of(harmless).keys()
    assert len(max(both("x" * 100_000)[0].splitlines(), key=len)) < 100_000 + 3000, "the command is kept whole, all else cut"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: (d / "config.json").write_text("{}"), "holds no draft"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), "corrupt or cut short"),
        (lambda d: (d / "training.json").write_text("["), "training.json cannot be read as JSON"),
        (lambda d: (d / "quantization.json").write_text("3"), "quantization.json holds no JSON object"),
        (
            lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace('layers": 3', 'layers": 2')),
            "draft",
        ),
    ],
)
def test_a_directory_that_is_no_whole_draft_is_refused(draft: Path, make: Any, message: str) -> None:
    make(draft)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        card_of(draft)


def test_a_count_that_the_tensors_do_not_hold_is_refused(draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"the tensors hold 9,904 parameters, config.json describes 14,512"):
        card_of(draft)


def test_a_card_of_ours_is_written_over_and_a_persons_is_not(draft: Path) -> None:
    card, options = draft / "README.md", CardOptions(str(draft))
    run_card(options)
    first = card.read_text()
    run_card(CardOptions(str(draft), results=()))
    assert card.read_text() == first
    card.write_bytes(card.read_bytes().replace(b"\n", b"\r\n"))
    assert not is_handwritten(card), "a checkout with other line ends is no edit"
    card.write_text(first.replace("Linux", "Linux and more"))
    with pytest.raises(ConfigError, match=r"README.md was written or edited by hand: give another --output, or --force"):
        run_card(options)
    write_card(draft)
    assert "Linux and more" in card.read_text(), "commands that end with a card leave a person's alone"
    run_card(CardOptions(str(draft), force=True))
    assert card.read_text() == first


def test_the_command_lists_what_is_to_be_given(flashdraft: Any, draft: Path, tmp_path: Path) -> None:
    code, out, err = flashdraft("card", str(draft))
    assert (code, out) == (0, f"wrote {draft / 'README.md'}\n")
    assert 'TODO(license): license = "apache-2.0"' in err
    assert "TODO(mt_bench): flashdraft eval mt-bench --target org/name --draft DIR --output RUN, then --results RUN" in err
    code, facts, _ = flashdraft("card", str(draft), "--facts-template")
    assert code == 0
    assert tomllib.loads(facts)["base_model"] == "org/name"
    (tmp_path / "facts.toml").write_text(facts.replace('license = ""', 'license = "MIT"'))
    run = written(tmp_path / "run", results(draft))
    other = written(tmp_path / "other", results(draft, "mini"))
    code, _, err = flashdraft("card", str(draft), "--results", str(run), str(other), "--facts", str(tmp_path / "facts.toml"))
    assert (code, "TODO(license)" in err, "TODO(mt_bench)" in err) == (0, False, False)
    assert front_of((draft / "README.md").read_text())["license"] == "mit"
    assert "#### flashdraft mini, revision" in (draft / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["builtin"], "builtin is no directory of yours to write into: say where the card goes with --output"),
        (["absent"], "absent is not a directory: give one with config.json"),
        (["DRAFT", "--results", "absent.json"], "there is no absent.json"),
        (["DRAFT", "--facts", "absent.toml"], "absent.toml: cannot read the facts (No such file"),
        (["DRAFT", "--output", "DRAFT"], "is a directory: give the name of a file"),
        (["DRAFT", "--output", "/dev/null/x"], "cannot be"),
    ],
)
def test_a_command_that_cannot_work_is_one_sentence(flashdraft: Any, draft: Path, arguments: list[str], message: str) -> None:
    code, _, err = flashdraft("card", *(str(draft) if a == "DRAFT" else a for a in arguments))
    assert (code, err.count("\n"), message in err) == (2, 1, True), err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("licence = 'mit'", "licence: there is no such fact: did you mean license?"),
        ("license = 3", "license must be a text, got '3'"),
        ("license = 'my own words'", "license must be a licence as the hub names it"),
        ("license_link = 'javascript:1'", "license_link must be an address, https://..., got 'javascript:1'"),
        ("repo = 'name'", "repo must be a hub id, OWNER/NAME, got 'name'"),
        ("limitations = 'one'", "limitations must be a list of texts"),
        ("training_data = 'p'", r"training_data must be tables, each under \[\[training_data\]\]"),
        ("[[training_data]]\nlink = 'x'", "training_data 1: `name` is missing"),
        ("[[training_data]]\nname = 'x'\nrows = 3", "training_data 1: there is no key 'rows'; the keys are name, link"),
        ("license =", "cannot read the facts"),
    ],
)
def test_facts_that_cannot_be_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "facts.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_facts(tmp_path / "facts.toml")


def test_facts_stand_where_their_todos_stood_and_empty_ones_count_as_absent(draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "facts.toml"
    file.write_text(template({}))
    assert read_facts(file) == {}, "what is not filled in says nothing"
    given = {fact.name: fact.example.strip("<>") for fact in FACTS if fact.kind == "text"} | {
        "references": ["https://a.org/b_c?d=1&e=2"]
    }
    given |= {"training_data": [{"name": "ours", "size": "3 rows"}], "limitations": ["Not \\ tried."]}
    file.write_text(template(given))
    assert read_facts(file) == given
    card = card_of(draft, read_facts(file))
    assert card.todo.keys() == {"mt_bench", "speed_bench", "test_hardware"}
    for words in (
        "[apache-2.0](<https://www.apache.org/licenses/LICENSE-2.0>)",
        "- <https://a.org/b_c?d=1&e=2>",
        "| ours | - | 3 rows | - | - | - |",
        "- Not \\\\ tried.",
    ):
        assert words in card.text


def test_a_date_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "facts.toml").write_text("release_date = 2026-01-31\n")
    assert read_facts(tmp_path / "facts.toml") == {"release_date": "2026-01-31"}


def test_values_are_what_they_render_as() -> None:
    for text in ("# a", "- b", "1. c", "=", "a_b_c _d_ *e*", "<b>&amp;</b>", "`x`", "[a](b)", "\\|", "~~s~~", "$x$"):
        [_, inline, _] = MarkdownIt("commonmark").parse(escape(text))
        assert inline.children is not None
        assert "".join(child.content for child in inline.children) == text
    assert code("a`b") == "``a`b``"
    assert fence("```") == "````\n```\n````"
    assert table(("a",), [(code("x|y"),)]).splitlines()[-1] == "| `x\\|y` |"
    assert [number(v) for v in (True, "1", None, float("inf"), 10**400, 2)] == [None, None, None, None, None, 2.0]
    assert decimal(1234.567) == "1,234.57"


def test_a_template_of_facts_can_be_read_again(tmp_path: Path) -> None:
    given = {"name": 'a\x7f"\\\u202e', "limitations": ["\x7f"], "training_data": [{"name": "n\x7f"}]}
    (tmp_path / "facts.toml").write_text(template(given))
    assert read_facts(tmp_path / "facts.toml") == given


@pytest.mark.parametrize("name", ["../..", "./x", "-x/y", "x/-y", "x/.."])
def test_a_path_or_an_option_is_no_hub_id(tmp_path: Path, name: str) -> None:
    (tmp_path / "facts.toml").write_text(f'repo = "{name}"')
    with pytest.raises(ConfigError, match="repo must be a hub id"):
        read_facts(tmp_path / "facts.toml")


def test_hashes_of_another_kind_are_refused(draft: Path, tmp_path: Path) -> None:
    found = results(draft)
    found["provenance"]["draft_hashes"] = {"DRAFT": ["x"]}
    with pytest.raises(CheckpointError, match="hashes of its drafts"):
        card_of(draft, None, written(tmp_path / "run", found))
