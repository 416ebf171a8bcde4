"""Text is that of decoding all tokens at once, comes as soon as it is settled, and ends at the first stop string."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flashdraft.text import GENERATION, MAX_WINDOW, Detokenizer, StopStrings, TextStream, ThinkSplit, split_thinking

CORPUS = [
    "the cat sat on the mat and looked at the hat",
    "def add(a, b):\n    return a + b\n",
    "naïve café über 你好 世界",
    "  two  spaces ",
]
BROKEN = "\ufffd"
SPECIAL = ["<s>", "</s>", "<|tool|>"]


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """As in GPT-2, Llama 3, Qwen and SmolLM2: any byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    """As in Llama 2, Mistral and Gemma: spaces are part of the words, unknown characters fall back to byte tokens."""
    words = ["▁the", "▁cat", "▁sat", "▁", "▁▁", "the", "cat", "s", "a", "t", ".", ",", "\n", "好", "é", "▁world", BROKEN]
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<unk>", *SPECIAL]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = [byte_level, metaspace]


def ids(tokenizer: PreTrainedTokenizerFast, tokens: Iterable[str]) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def byte_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text as one token a byte."""
    if tokenizer is metaspace():
        return ids(tokenizer, [f"<0x{byte:02X}>" for byte in text.encode()])
    of_byte = {_byte_of(char): char for char in pre_tokenizers.ByteLevel.alphabet()}
    return ids(tokenizer, [of_byte[byte] for byte in text.encode()])


@functools.cache
def _byte_of(char: str) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    table |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)}
    return table[char]


def decode(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], *, skip: bool = True) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def stream(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], **options: Any) -> tuple[str, list[str]]:
    """The text, and the pieces taken after every token and at the end."""
    text = TextStream(tokenizer, **options)
    pieces = []
    for token in tokens:
        reason = text.push(token)
        pieces.append(text.take())
        if reason:
            break
    text.finish()
    pieces.append(text.take())
    assert "".join(pieces) == text.text
    return text.text, pieces


def tokens_of(make: Any, **sizes: int) -> st.SearchStrategy[list[int]]:
    """Mostly tokens of real text, some of them byte by byte, some special."""
    tokenizer = make()
    text = st.text(st.sampled_from("the cat sat.\n ,aé好你😀ﬀ" + BROKEN), min_size=1, max_size=6)
    encoded = text.map(lambda t: list(tokenizer.encode(t, add_special_tokens=False)))
    in_bytes = text.map(lambda t: byte_ids(tokenizer, t.replace(" ", "")))  # a space always has a token of its own
    parts = st.one_of(encoded, in_bytes, st.sampled_from(SPECIAL).map(lambda t: ids(tokenizer, [t])))
    return st.lists(parts, **sizes).map(lambda lists: [token for part in lists for token in part])


@pytest.mark.parametrize("make", TOKENIZERS)
def test_one_by_one_gives_the_text_of_decoding_all_at_once(make: Any) -> None:
    @given(tokens_of(make, max_size=12), st.booleans())
    @settings(max_examples=150, deadline=None)
    def check(tokens: list[int], skip: bool) -> None:
        assert stream(make(), tokens, skip_special_tokens=skip)[0] == decode(make(), tokens, skip=skip)

    check()


@pytest.mark.parametrize("make", TOKENIZERS)
def test_any_tokens_at_all_never_lose_text_that_is_not_broken(make: Any) -> None:
    @given(st.lists(st.integers(0, len(make()) + 3), max_size=40))
    @settings(max_examples=150, deadline=None)
    def check(tokens: list[int]) -> None:
        text, pieces = stream(make(), tokens)
        letters = iter(text)
        assert all(c in letters for c in decode(make(), tokens) if c != BROKEN)  # in order
        assert all(p.count(BROKEN) <= 4 for p in pieces[:-1])

    check()


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_skipped_token_between_the_bytes_of_a_character_does_not_break_it(make: Any) -> None:
    first, *rest = byte_ids(make(), "你")
    tokens = [first, *ids(make(), ["<|tool|>"]), *rest, *byte_ids(make(), "a")]
    assert stream(make(), tokens)[0] == decode(make(), tokens) == "你a"
    assert BROKEN in stream(make(), tokens, skip_special_tokens=False)[0]


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("char", ["é", "你", "😀"])
def test_a_character_over_several_tokens_comes_whole(make: Any, char: str) -> None:
    tokenizer = make()
    parts = byte_ids(tokenizer, char)
    text, pieces = stream(tokenizer, byte_ids(tokenizer, "a") + parts + parts + byte_ids(tokenizer, "b"))
    assert text == f"a{char}{char}b"
    assert [p for p in pieces if p] == ["a", char, char, "b"]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_real_replacement_character_survives(make: Any) -> None:
    tokenizer = make()
    real = byte_ids(tokenizer, BROKEN)
    a = byte_ids(tokenizer, "a")
    assert stream(tokenizer, a + real + a)[0] == f"a{BROKEN}a"
    assert stream(tokenizer, real * 9 + a)[0] == BROKEN * 9 + "a"
    assert stream(tokenizer, a + real)[0] == f"a{BROKEN}"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_an_unfinished_character_is_flushed_at_the_end_and_before_other_text(make: Any) -> None:
    tokenizer = make()
    start = byte_ids(tokenizer, "你")
    beginning = byte_ids(tokenizer, "😀")[:2]
    assert stream(tokenizer, start + beginning)[1] == ["", "", "你", "", "", BROKEN]
    comma = ids(tokenizer, [","])
    assert stream(tokenizer, beginning + comma + start)[0] == f"{BROKEN},你"
    assert stream(tokenizer, beginning + start)[0] == f"{BROKEN}你"


def test_tokens_that_straddle_characters_give_them_as_they_complete() -> None:
    first, second, third = "你".encode()
    straddling = bytes([second, third, first])

    class Bytes:
        def convert_tokens_to_ids(self, tokens: list[str]) -> list[None]:
            return [None for _ in tokens]

        def decode(self, token_ids: list[int], **_: Any) -> str:
            return b"".join(straddling if i else bytes([first]) for i in token_ids).decode(errors="replace")

    text = TextStream(Bytes())
    assert text.push(0) is None
    for _ in range(3 * MAX_WINDOW):
        text.push(1)
        assert text.take() == "你"
    text.finish()
    assert text.take() == BROKEN


def test_the_leading_space_of_a_sentencepiece_token_is_kept_inside_the_text_and_dropped_at_its_start() -> None:
    tokenizer = metaspace()
    the, cat, space = ids(tokenizer, ["▁the", "▁cat", "▁"])
    bos, tool = ids(tokenizer, ["<s>", "<|tool|>"])
    assert stream(tokenizer, [the, cat, the, cat])[1] == ["the", " cat", " the", " cat", ""]
    assert stream(tokenizer, [bos, the, tool, tool, cat])[0] == "the cat"
    assert stream(tokenizer, [space, space, the])[0] == decode(tokenizer, [space, space, the]) == "  the"
    assert stream(tokenizer, [cat], prompt_ids=[bos, the])[0] == " cat"
    assert stream(tokenizer, [the] + [tool] * 200 + [cat] * 30)[0] == "the" + " cat" * 30


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_prompt_gives_context_but_no_text(make: Any) -> None:
    @given(tokens_of(make, min_size=1, max_size=5), tokens_of(make, max_size=5))
    @settings(max_examples=100, deadline=None)
    def check(prompt: list[int], tokens: list[int]) -> None:
        before, both = decode(make(), prompt), decode(make(), prompt + tokens)
        if before.strip() and both.startswith(before):
            anchor = byte_ids(make(), "a")  # so that the prompt's visible end is among its last tokens
            expected = decode(make(), prompt + anchor + tokens)[len(decode(make(), prompt + anchor)) :]
            assert stream(make(), tokens, prompt_ids=prompt + anchor)[0] == expected

    check()


def test_a_character_that_the_prompt_began_comes_whole() -> None:
    tokenizer = byte_level()
    parts = byte_ids(tokenizer, "😀")
    assert stream(tokenizer, parts[2:], prompt_ids=byte_ids(tokenizer, "ok ") + parts[:2])[0] == "😀"
    assert stream(tokenizer, byte_ids(tokenizer, "a"), prompt_ids=byte_ids(tokenizer, BROKEN))[0] == "a"


def test_the_window_stays_short_whatever_comes() -> None:
    lengths: list[int] = []

    class Counting:
        def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
            return byte_level().convert_tokens_to_ids(tokens)

        def decode(self, token_ids: list[int], **options: Any) -> str:
            lengths.append(len(token_ids))
            return str(byte_level().decode(token_ids, **options))

    plain = byte_ids(byte_level(), "the cat ") * 40
    detokenizer = Detokenizer(Counting())
    assert "".join(map(detokenizer.push, plain)) == "the cat " * 40
    assert max(lengths) <= 2 * GENERATION
    assert len(lengths) <= len(plain) * (1 + 1 / GENERATION) + 1
    floods = [byte_ids(byte_level(), "😀")[1], byte_level().eos_token_id, *byte_ids(byte_level(), BROKEN)]
    for token in floods:
        lengths.clear()
        detokenizer = Detokenizer(Counting())
        for _ in range(500):
            detokenizer.push(token)
        assert max(lengths) <= 3 * MAX_WINDOW


# Stop strings


def first_end(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


def test_a_stop_string_is_cut_off_or_kept_whole() -> None:
    tokenizer = byte_level()
    tokens = byte_ids(tokenizer, "the cat sat on")
    for include, expected in ((False, "the "), (True, "the cat")):
        text = TextStream(tokenizer, stop=["cat"], include_stop_str_in_output=include)
        reasons = [text.push(token) for token in tokens[:7]]
        assert reasons == [None] * 6 + ["stop"]
        assert text.stop_string == "cat"
        assert text.text == expected
        assert text.push(tokens[7]) == "stop"
        text.finish()
        assert text.take() == expected
        assert text.text == expected
        assert text.take() == ""


def test_the_start_of_a_stop_string_is_held_back_and_given_out_when_it_comes_to_nothing() -> None:
    tokenizer = byte_level()
    assert stream(tokenizer, byte_ids(tokenizer, "acab"), stop=["cat"])[1] == ["a", "", "", "cab", ""]
    assert stream(tokenizer, byte_ids(tokenizer, "xca"), stop=["cat"])[1] == ["x", "", "", "ca"]
    assert stream(tokenizer, byte_ids(tokenizer, "aab"), stop=["aab", "b"])[1] == ["", "", "", ""]


def test_the_first_end_wins_and_of_equal_ends_the_longest_stop_string() -> None:
    tokenizer = byte_level()
    tokens = byte_ids(tokenizer, "the cat sat")
    assert stream(tokenizer, tokens, stop=["cat sat", "at"])[0] == "the c"
    assert stream(tokenizer, tokens, stop=["at", "cat", "t"])[0] == ""
    assert stream(tokenizer, tokens, stop=["at", " cat"])[0] == "the"


def test_a_stop_string_inside_one_token_or_at_a_split_character() -> None:
    tokenizer = metaspace()
    the, cat = ids(tokenizer, ["▁the", "▁cat"])
    assert stream(tokenizer, [the, cat, the], stop=["ca"])[0] == "the "
    assert stream(tokenizer, [the, *byte_ids(tokenizer, "😀"), cat], stop=["😀"])[0] == "the"
    assert stream(tokenizer, [the, *byte_ids(tokenizer, BROKEN)], stop=[BROKEN])[0] == "the"


def test_a_stop_string_within_min_tokens_does_not_count() -> None:
    tokenizer = byte_level()
    tokens = byte_ids(tokenizer, "aXbXcX")
    assert stream(tokenizer, tokens, stop=["X"])[0] == "a"
    assert stream(tokenizer, tokens, stop=["X"], min_tokens=2)[0] == "aXb"
    assert stream(tokenizer, tokens, stop=["bX"], min_tokens=3)[0] == "aX"


def test_a_stop_token_leaves_no_text_unless_asked_for() -> None:
    tokenizer = byte_level()
    a, b, stop = byte_ids(tokenizer, "ab!")
    assert stream(tokenizer, [a, b, stop, a], stop_ids={stop})[0] == "ab"
    assert stream(tokenizer, [a, b, stop, a], stop_ids={stop}, include_stop_str_in_output=True)[0] == "ab!"
    eos = tokenizer.eos_token_id
    assert stream(tokenizer, [a, eos], stop_ids={eos}, skip_special_tokens=False)[0] == "a"
    assert stream(tokenizer, [a, eos], stop_ids={eos}, skip_special_tokens=False, include_stop_str_in_output=True)[0] == "a</s>"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_stop_strings_are_found_where_a_search_of_the_whole_text_finds_them(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    for i, char in enumerate(text, start=1):
        found = matcher.push(char)
        if found:
            assert (i, found) == first_end(text, stops)
            return
        starts = [n for stop in stops for n in range(len(stop)) if text[:i].endswith(stop[:n])]
        assert matcher.begun == max(starts)
    assert first_end(text, stops) is None


@pytest.mark.parametrize("make", TOKENIZERS)
def test_how_tokens_are_cut_into_blocks_changes_nothing(make: Any) -> None:
    stops = st.lists(st.sampled_from(["cat", "t ", "at.", "好", "a\n", "😀a", "s"]), max_size=3, unique=True)

    @given(tokens_of(make, max_size=8), stops, st.booleans(), st.lists(st.integers(1, 8), max_size=30))
    @settings(max_examples=150, deadline=None)
    def check(tokens: list[int], stop: list[str], include: bool, widths: list[int]) -> None:
        options: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}
        one_by_one, _ = stream(make(), tokens, **options)
        whole = decode(make(), tokens)
        end = first_end(whole, stop)
        assert one_by_one == (whole if end is None else whole[: end[0] if include else end[0] - len(end[1])])
        blocks = TextStream(make(), **options)
        taken, rest = "", list(tokens)
        for width in [*widths, len(tokens) + 1]:
            block, rest = rest[:width], rest[width:]
            if any(blocks.push(token) for token in block):
                break
            taken += blocks.take()
            assert one_by_one.startswith(taken)
        blocks.finish()
        assert taken + blocks.take() == one_by_one

    check()


# Thinking


def split_in_pieces(text: str, cuts: Sequence[int], **options: Any) -> list[tuple[str, str]]:
    split = ThinkSplit(**options)
    bounds = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    events = [event for a, b in itertools.pairwise(bounds) for event in split.push(text[a:b])]
    return events + split.finish()


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>hm</think>yes", "hm", "yes"),
        ("\n<think>\nhm\n</think>\n\nyes", "\nhm\n", "\n\nyes"),
        ("no thinking", "", "no thinking"),
        ("  <thin air", "", "  <thin air"),
        ("<think></think>", "", ""),
        ("<think>cut off</thi", "cut off</thi", ""),
        ("<think>a</think>the marker <think>b</think>", "a", "the marker <think>b</think>"),
        ("<thin", "", "<thin"),
        ("", "", ""),
    ],
)
def test_thinking_is_told_from_the_answer(text: str, thinking: str, answer: str) -> None:
    assert split_thinking(text) == (thinking, answer)


def test_thinking_that_the_prompt_opened_needs_no_marker() -> None:
    assert split_thinking("hm</think>yes", opened=True) == ("hm", "yes")
    assert split_thinking("[T]hm[/T]yes", "[T]", "[/T]") == ("hm", "yes")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "a", " ", "\n", ">"]), max_size=8).map("".join),
    st.lists(st.integers(1, 40), max_size=10),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_markers_are_found_wherever_the_text_is_cut(text: str, cuts: list[int], opened: bool) -> None:
    events = split_in_pieces(text, cuts, opened=opened)
    assert all(piece for _, piece in events)
    assert [kind for kind, _ in events] == sorted((kind for kind, _ in events), reverse=True)  # thinking, then the answer
    joined = tuple("".join(piece for kind, piece in events if kind == wanted) for wanted in ("thinking", "answer"))
    assert joined == split_thinking(text, opened=opened)
