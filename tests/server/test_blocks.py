"""However a stream of tokens is cut into blocks, what is answered is the same: ends, stop strings, characters, counts."""

from __future__ import annotations

import pytest

STOP = 1  # </s>
BLOCKS = (0, 1, 2, 3, 7)  # proposals that are right in each step


def letters(says, text: str) -> list[int]:
    """One token a byte, whatever words the vocabulary has."""
    return [says.llm.tokenizer.convert_tokens_to_ids(letter) for letter in byte_letters(text)]


def byte_letters(text: str) -> list[str]:
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    table = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [table[byte] for byte in text.encode()]


def ask(says, **body):
    """An answer, asked for whole and streamed, which must agree."""
    body = {"max_tokens": 200, "return_token_ids": True, "logprobs": True, "stop_token_ids": [STOP], **body}
    whole = says.chat(**body)
    chunks = says.stream(**body, stream_options={"include_usage": True})
    choice, last = whole["choices"][0], chunks[-1]
    deltas = [c["choices"][0] for c in chunks[:-1]]
    assert "".join(d["delta"].get("content") or "" for d in deltas) == (choice["message"]["content"] or "")
    assert "".join(d["delta"].get("reasoning") or "" for d in deltas) == choice["message"].get("reasoning", "")
    assert [t for d in deltas for t in d.get("token_ids", [])] == choice["token_ids"]
    entries = [e for d in deltas for e in (d["logprobs"] or {"content": []})["content"]]
    assert entries == choice["logprobs"]["content"]
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    assert [d["finish_reason"] for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert len(choice["token_ids"]) == len(entries) == whole["usage"]["completion_tokens"]
    assert {k: last["usage"][k] for k in ("completion_tokens", "prompt_tokens")} == {
        k: whole["usage"][k] for k in ("completion_tokens", "prompt_tokens")
    }
    steps = whole["metrics"]["speculative_decoding"]
    assert sum(a + 1 for a in steps["per_step_accepted"]) + 1 == whole["usage"]["completion_tokens"]
    return choice, whole["usage"], steps


@pytest.mark.parametrize("accepted", BLOCKS)
@pytest.mark.parametrize(
    ("script", "max_tokens", "reason", "count"),
    [
        ([10, 11, STOP, 20, 21, 22], 5, "stop", 3),
        ([10, 11, 12, 13, STOP, 20], 5, "stop", 5),  # at the cap: a stop inside the budget beats length
        ([10, 11, 12, 13, 14, STOP], 5, "length", 5),  # beyond it
        ([STOP, 10, 11], 5, "stop", 1),
        ([10, STOP], 1, "length", 1),
    ],
)
def test_a_stop_token_in_a_block(says, say, accepted, script, max_tokens, reason, count):
    say(script, accepted)
    choice, usage, _ = ask(says, max_tokens=max_tokens)
    assert (choice["finish_reason"], usage["completion_tokens"]) == (reason, count)
    assert choice["token_ids"] == script[:count]


def test_a_terminal_block_counts_what_it_committed(says, say):
    say([10, 11, 12, STOP, 14, 15, 16, 17])  # 10 comes from the prompt, the block is [11, 12, STOP, 14, ...]
    before = says.metric("flashdraft:discarded_tokens_total")
    answer = says.chat(max_tokens=50)
    steps = answer["metrics"]["speculative_decoding"]
    assert (steps["mean_acceptance_length"], steps["num_accepted_draft_tokens"]) == (3, 2)
    assert answer["usage"]["completion_tokens"] == 4
    assert says.metric("flashdraft:discarded_tokens_total") - before == 5


@pytest.mark.parametrize("accepted", BLOCKS)
@pytest.mark.parametrize(
    ("text", "stop", "shown", "count"),
    [
        ("abcdef", "b", "a", 2),
        ("abcdef", "a", "", 1),
        ("abcdefghijkl", "de", "abc", 5),
        ("abcdefghijkl", "hij", "abcdefg", 10),  # over two blocks
        ("aabab!", "abab", "a", 5),  # begun twice
        ("abcdef", "xyz", "abcdef", 7),
        ("ab<stop>cd", "<stop>", "ab", 8),
    ],
)
def test_a_stop_string_anywhere(says, say, accepted, text, stop, shown, count):
    say([*letters(says, text), STOP], accepted)
    choice, usage, _ = ask(says, stop=stop)
    assert (choice["message"]["content"], usage["completion_tokens"]) == (shown, count)
    assert choice["stop_reason"] == (stop if stop in text else STOP)
    kept, _, _ = ask(says, stop=[stop], include_stop_str_in_output=True)
    assert kept["message"]["content"].removesuffix("</s>") == shown + (stop if stop in text else "")


@pytest.mark.parametrize("accepted", BLOCKS)
@pytest.mark.parametrize("text", ["né 👩‍👩‍👧 日本語", "a\ufffdb", "\ufffd", "🙂🙂"])
def test_characters_over_tokens_and_blocks(says, say, accepted, text):
    say([*letters(says, text), STOP], accepted)
    choice, usage, _ = ask(says)
    assert choice["message"]["content"] == text
    assert usage["completion_tokens"] == len(text.encode()) + 1


def test_bytes_that_are_no_character_end_as_one_sign(says, say):
    say([*letters(says, "a🙂")[:3], STOP])
    assert ask(says)[0]["message"]["content"] == "a\ufffd"


def test_logprobs_carry_the_bytes_of_parts_of_characters(says, say):
    say([*letters(says, "🙂"), STOP])
    entries = ask(says)[0]["logprobs"]["content"]
    assert [byte for entry in entries[:-1] for byte in entry["bytes"]] == list("🙂".encode())


@pytest.mark.parametrize("accepted", BLOCKS)
def test_thinking_is_told_apart_and_counted(says, say, accepted):
    say("<think>\nthe quick</think>\n\nfox</s>", accepted)
    choice, usage, _ = ask(says)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("the quick", "fox")
    assert choice["message"]["reasoning_content"] == "the quick"
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thinking < usage["completion_tokens"]
    hidden = says.chat(max_tokens=200, include_reasoning=False)["choices"][0]["message"]
    assert (hidden.get("reasoning"), hidden["content"]) == (None, "fox")


def test_thinking_that_the_prompt_opened_and_that_never_ends(says, say):
    say("the quick fox")
    body = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 3, "ignore_eos": True, "stop_token_ids": []}
    choice, usage, _ = ask(says, **body)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 3


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def calls_of(says, **body):
    choice, *_ = ask(says, tools=TOOLS, **body)
    chunks = says.stream(tools=TOOLS, max_tokens=200, **body)
    streamed = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    whole = choice["message"].get("tool_calls", [])
    assert [c["function"] for c in streamed] == [c["function"] for c in whole]
    assert [c["index"] for c in streamed] == list(range(len(whole)))
    assert len({c["id"] for c in whole}) == len(whole)
    return choice, [(c["function"]["name"], c["function"]["arguments"]) for c in whole]


@pytest.mark.parametrize("accepted", BLOCKS)
@pytest.mark.parametrize(
    ("script", "content", "calls", "reason"),
    [
        (CALL, None, 1, "tool_calls"),
        (CALL + CALL, None, 2, "tool_calls"),
        (f"{CALL}\n{CALL}\n{CALL}", None, 3, "tool_calls"),
        (f"I look.\n{CALL}", "I look.", 1, "tool_calls"),
        (f"<think>so</think>{CALL}", None, 1, "tool_calls"),  # right behind the end of the thinking
        ("a stray </tool_call> here", "a stray </tool_call> here", 0, "stop"),
        ("write <tool_call> first", "write <tool_call> first", 0, "stop"),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', 0, "stop"),
        (CALL.removesuffix("</tool_call>"), None, 1, "tool_calls"),
        ('<tool_call>{"name": "look", "argum', '<tool_call>{"name": "look", "argum', 0, "stop"),
    ],
)
def test_tool_calls(says, say, accepted, script, content, calls, reason):
    say([*says.llm.tokenizer.encode(script), STOP], accepted)
    choice, found = calls_of(says)
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
    assert found == [("look", '{"at": "a"}')] * calls


def test_without_tools_a_call_is_text(says, say):
    say([*says.llm.tokenizer.encode(CALL), STOP])
    assert ask(says)[0]["message"]["content"] == CALL
    assert ask(says, tools=TOOLS, tool_choice="none")[0]["message"]["content"] == CALL


def test_a_marker_that_is_only_spelt_is_plain_text(says, say):
    text = "write <tool_call>{} or <think>"
    say([*letters(says, text), STOP])
    choice, found = calls_of(says)
    assert (choice["message"]["content"], found) == (text, [])


def test_earlier_calls_and_their_results_reach_the_template(says, say):
    say("fox</s>")
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "b"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]
    ids = says.post("/tokenize", {"messages": messages, "tools": TOOLS})["tokens"]
    text = says.post("/detokenize", {"tokens": ids})["prompt"]
    assert "look write" in text
    assert "the\nfox" in text
    assert '{"at": "b"}' in text
    assert says.chat(messages=messages, tools=TOOLS)["choices"][0]["message"]["content"] == "fox"
