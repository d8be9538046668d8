"""Streamed text is exact: whole characters, no piece of a stop string, the same text however tokens are grouped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlc.detokenizer import IncrementalDetokenizer
from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.request import SamplingParams

EMOJI = "Hi 👩‍👩‍👧‍👦! 🇩🇪 👍🏽 1️⃣ — naïve Ünïcödé, 你好世界, مرحبا, नमस्ते ✨\n\n\tend"
PLAIN = SamplingParams()
WRITINGS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ab .\n", max_size=40),
    st.lists(st.sampled_from(["👩‍👩‍👧", "🇩🇪", "👍🏽", "é", "é", "你好", " ", "word", "\u200d", "\ufffd", "𝒳"])).map(
        "".join
    ),
)


def stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    sizes: Sequence[int],
    params: SamplingParams = PLAIN,
    prompt: Sequence[int] = (),
) -> tuple[list[str], IncrementalDetokenizer]:
    """Feed tokens in groups of the given sizes (one by one when they run out), then finish."""
    detokenizer = IncrementalDetokenizer(tokenizer, params, prompt)
    deltas, position = [], 0
    for size in [*sizes, *[1] * len(token_ids)]:
        if position >= len(token_ids):
            break
        deltas.append(detokenizer.feed(token_ids[position : position + size]))
        position += size
    deltas.append(detokenizer.finish())
    return deltas, detokenizer


def test_every_way_to_group_the_tokens_gives_the_same_text(smollm: Tokenizer) -> None:
    token_ids = smollm.encode("Hey 👍🏽é!")
    assert len(token_ids) >= 8
    for pattern in range(2 ** (len(token_ids) - 1)):
        sizes = [1]
        for bit in range(len(token_ids) - 1):
            if pattern >> bit & 1:
                sizes[-1] += 1
            else:
                sizes.append(1)
        deltas, _ = stream(smollm, token_ids, sizes)
        assert "".join(deltas) == "Hey 👍🏽é!"
        assert not any("\ufffd" in delta for delta in deltas)


def test_every_cut_in_two_gives_the_same_text(smollm: Tokenizer) -> None:
    token_ids = smollm.encode(EMOJI)
    for cut in range(len(token_ids) + 1):
        deltas, detokenizer = stream(smollm, token_ids, [cut, len(token_ids)])
        assert "".join(deltas) == EMOJI == detokenizer.text
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
@settings(max_examples=50, deadline=None)
@given(text=WRITINGS, sizes=st.lists(st.integers(0, 5), max_size=12))
def test_any_text_streams_whole(name: str, text: str, sizes: list[int], tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, detokenizer = stream(tokenizer, token_ids, sizes)
    assert "".join(deltas) == tokenizer.decode(token_ids) == detokenizer.text
    assert any("\ufffd" in delta for delta in deltas) <= ("\ufffd" in tokenizer.decode(token_ids))


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 5), max_size=12))
def test_any_tokens_even_broken_bytes_stream_as_they_decode(
    name: str, skip_special_tokens: bool, data: st.DataObject, sizes: list[int], tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    awkward = sorted(tokenizer.special_token_ids) + [
        token for token in range(min(600, tokenizer.vocab_size)) if "\ufffd" in tokenizer.decode([token], False)
    ]
    token = st.one_of(st.sampled_from(awkward), st.integers(0, tokenizer.vocab_size - 1))
    token_ids = data.draw(st.lists(token, max_size=20))
    deltas, _ = stream(tokenizer, token_ids, sizes, SamplingParams(skip_special_tokens=skip_special_tokens))
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens)


def test_broken_bytes_at_the_end_come_out_only_at_the_finish(smollm: Tokenizer) -> None:
    token_ids = smollm.encode("ok 👍🏽")[:-1]
    deltas, _ = stream(smollm, token_ids, [])
    assert "".join(deltas[:-1]) == "ok 👍"
    assert deltas[-1].strip("\ufffd") == ""
    assert deltas[-1]


def test_nothing_comes_after_the_finish(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm, PLAIN)
    detokenizer.feed(smollm.encode("done"))
    detokenizer.finish()
    assert detokenizer.finish() == ""
    assert detokenizer.feed(smollm.encode(" more")) == ""
    assert detokenizer.text == "done"


# ---- stop strings


def first_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, int, str] | None:
    """Oracle: end, start and name of the stop string completed first beyond ``after`` characters."""
    found = [
        (end, end - len(stop), stop)
        for stop in stops
        for end in range(max(after + 1, len(stop)), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    return min(found, default=None)


def certain(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of some first tokens up to the last one that ends with a whole character. A token may hold a space
    and half an emoji; the space then comes with the rest of the emoji."""
    texts = (tokenizer.decode(token_ids[:end]) for end in range(len(token_ids), -1, -1))
    return next(text for text in texts if not text.endswith("\ufffd"))


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(
        st.text(alphabet="ab .", min_size=1, max_size=30),
        st.lists(st.sampled_from(["👍🏽", "🇩🇪", "é", "STOP", "ST", "OP", " ", "\n"]), min_size=1).map("".join),
    ),
    stops=st.lists(
        st.one_of(
            st.text(alphabet="ab .", min_size=1, max_size=4), st.sampled_from(["STOP", "👍🏽", "🏽", "\n\n", "OPST"])
        ),
        min_size=1,
        max_size=3,
    ),
    sizes=st.lists(st.integers(1, 6), max_size=10),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings_match_a_search_in_the_whole_text(
    smollm: Tokenizer, text: str, stops: list[str], sizes: list[int], include: bool, min_tokens: int
) -> None:
    token_ids = smollm.encode(text)
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    deltas, detokenizer = stream(smollm, token_ids, sizes, params)

    expected = first_stop(text, stops, after=len(certain(smollm, token_ids[:min_tokens])))
    if expected is None:
        assert "".join(deltas) == text
        assert not detokenizer.stopped
        assert detokenizer.num_tokens == len(token_ids)
        return
    end, start, stop = expected
    assert "".join(deltas) == (text[:end] if include else text[:start])
    assert detokenizer.stop_string == stop
    needed = next(k for k in range(1, len(token_ids) + 1) if len(certain(smollm, token_ids[:k])) >= end)
    assert detokenizer.num_tokens == needed


def test_text_that_may_become_a_stop_string_is_held_back(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm, SamplingParams(stop="\nUser:"))
    assert detokenizer.feed(smollm.encode("Fine.\n")) == "Fine."
    assert detokenizer.feed(smollm.encode("User")) == ""
    assert detokenizer.feed(smollm.encode("s")) == "\nUsers"
    assert detokenizer.feed(smollm.encode("\nUser: and more")) == ""
    assert detokenizer.stop_string == "\nUser:"
    assert detokenizer.text == "Fine.\nUsers"


def test_held_back_text_is_given_out_at_the_finish(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm, SamplingParams(stop="\nUser:"))
    assert detokenizer.feed(smollm.encode("Fine.\nUse")) == "Fine."
    assert detokenizer.finish() == "\nUse"


def test_the_longest_of_stop_strings_that_end_together_is_cut_off(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm, SamplingParams(stop=("END", "THE END")))
    assert detokenizer.feed(smollm.encode("It is THE END of it")) == "It is "
    assert detokenizer.stop_string == "THE END"


def test_after_a_stop_string_further_tokens_are_ignored(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm, SamplingParams(stop="."))
    assert detokenizer.feed(smollm.encode("One. Two")) == "One"
    seen = detokenizer.num_tokens
    assert detokenizer.feed(smollm.encode(" Three")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == seen == 2


# ---- stop tokens, special tokens, leading spaces


@pytest.mark.parametrize(("include", "text"), [(False, "Hello"), (True, "Hello world")])
def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(smollm: Tokenizer, include: bool, text: str) -> None:
    token_ids = smollm.encode("Hello world")
    detokenizer = IncrementalDetokenizer(smollm, SamplingParams(include_stop_str_in_output=include))
    assert detokenizer.feed(token_ids, stop_token=True) + detokenizer.finish() == text
    assert detokenizer.num_tokens == 2


def test_special_tokens_are_shown_only_when_asked_for(smollm: Tokenizer) -> None:
    token_ids = smollm.encode("a<|im_end|>b")
    assert "".join(stream(smollm, token_ids, [])[0]) == "ab"
    params = SamplingParams(skip_special_tokens=False)
    assert "".join(stream(smollm, token_ids, [], params)[0]) == "a<|im_end|>b"


def test_a_continued_text_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("The quick")
    answer = sentencepiece.encode("brown fox", add_special_tokens=False)
    assert "".join(stream(sentencepiece, answer, [], prompt=prompt)[0]) == " brown fox"
    assert "".join(stream(sentencepiece, answer, [], prompt=prompt[:1])[0]) == "brown fox"


def test_a_prompt_that_ends_within_a_character_does_not_leak_into_the_answer(smollm: Tokenizer) -> None:
    token_ids = smollm.encode("ok 👍🏽 fine")
    cut = len(smollm.encode("ok 👍🏽")) - 1
    deltas, _ = stream(smollm, token_ids[cut:], [], prompt=token_ids[:cut])
    assert "".join(deltas) == smollm.decode(token_ids[cut:])


def test_a_line_break_written_as_a_byte_survives_a_broken_character(sentencepiece: Tokenizer) -> None:
    newline, broken = sentencepiece.encode("\n")[-1], sentencepiece.encode("👍")[-4:-1]
    token_ids = [newline, *broken, *sentencepiece.encode("dog", add_special_tokens=False)]
    deltas, _ = stream(sentencepiece, token_ids, [], prompt=sentencepiece.encode("fox"))
    prefix = sentencepiece.encode("fox")[-1:]
    assert "".join(deltas) == sentencepiece.decode([*prefix, *token_ids])[len(sentencepiece.decode(prefix)) :]


@pytest.fixture(scope="module")
def tokenizers(smollm: Tokenizer, sentencepiece: Tokenizer) -> dict[str, Tokenizer]:
    return {"smollm": smollm, "sentencepiece": sentencepiece}
