"""Text that comes in pieces equals text that comes at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.answer import Answer, AnswerOptions
from bootstrap.detokenize import IncrementalDetokenizer
from bootstrap.stop_strings import StopStrings
from bootstrap.text import TextModel
from engine.core.errors import InvalidField
from engine.core.sampling import FinishReason, StoppingParams, finish_reason
from engine.core.types import RoomKey, TokenOutput
from tests.helpers.tiny_tokenizer import byte_id, byte_level_tokenizer, fallback_tokenizer

BYTES = TextModel(byte_level_tokenizer())
FALLBACK = TextModel(fallback_tokenizer())

TEXT = st.text(alphabet=st.sampled_from("abc é漢😀 \n"), max_size=40)


def in_pieces(model: TextModel, ids: Sequence[int], skip: bool = False) -> str:
    detokenizer = IncrementalDetokenizer(model, skip)
    text = ""
    whole = model.decode(ids, skip)
    for token_id in ids:
        text += detokenizer.push(token_id)
        assert whole.startswith(text), "what was shown cannot be taken back"
    return text + detokenizer.flush()


@settings(deadline=None)
@given(st.lists(st.integers(0, 263), max_size=60), st.booleans())
def test_any_byte_tokens(ids: list[int], skip: bool) -> None:
    assert in_pieces(BYTES, ids, skip) == BYTES.decode(ids, skip)


@settings(deadline=None)
@given(st.lists(st.integers(0, 271), max_size=60), st.booleans())
def test_any_tokens_with_byte_fallback(ids: list[int], skip: bool) -> None:
    assert in_pieces(FALLBACK, ids, skip) == FALLBACK.decode(ids, skip)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 198, 262, 259, 264, 265, 269]), max_size=60))
def test_special_and_empty_tokens_among_words(ids: list[int]) -> None:
    assert in_pieces(FALLBACK, ids, True) == FALLBACK.decode(ids, True)


@settings(deadline=None)
@given(TEXT)
def test_no_half_character_is_shown(text: str) -> None:
    ids = BYTES.encode(text)
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF]), min_size=100, max_size=200))
def test_a_long_run_of_garbage_is_not_decoded_again_and_again(garbage: list[int]) -> None:
    ids = [byte_id(byte) for byte in garbage]
    longest = 0

    class Counting(TextModel):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            nonlocal longest
            if len(token_ids) < len(ids):
                longest = max(longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    assert in_pieces(Counting(byte_level_tokenizer()), ids) == BYTES.decode(ids)
    assert longest <= 20


def naive(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Text before the first stop string to be complete, the longest of those that end at one place."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


LETTERS = st.text(alphabet="ab", max_size=30)


@settings(deadline=None)
@given(LETTERS, st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4), st.data())
def test_stop_strings_are_found_wherever_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    matcher = StopStrings(stops)
    shown = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += matcher.push(text[start:end])
        expected, _ = naive(text, stops)
        assert expected.startswith(shown), "what may belong to a stop string was shown"
    shown += matcher.flush()
    assert (shown, matcher.matched) == naive(text, stops)


@settings(deadline=None)
@given(LETTERS, st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_start_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@settings(deadline=None)
@given(
    st.text(alphabet=st.sampled_from("aé漢😀"), max_size=12),
    st.lists(st.text(alphabet=st.sampled_from("aé漢😀"), min_size=1, max_size=3), max_size=3),
    st.integers(0, 20),
    st.booleans(),
)
def test_stop_strings_are_searched_for_behind_min_new_tokens(
    text: str, stops: list[str], least: int, fallback: bool
) -> None:
    """From the first character on that no part of an earlier token is in, however its bytes are held back."""
    ids = [3 + byte for byte in text.encode()] if fallback else BYTES.encode(text)
    spared = BYTES.decode(BYTES.encode(text)[:least])  # ends in one replacement character, if in half a character
    answer = Answer(FALLBACK if fallback else BYTES, AnswerOptions(stop=tuple(stops), min_new_tokens=least))
    shown = "".join(answer.extend([TokenOutput(RoomKey(1, 0), i, id, 0.0)]).text for i, id in enumerate(ids))
    searched, matched = naive(text[len(spared) :], stops)
    assert (shown + answer.finish(), answer.matched_stop) == (text[: len(spared)] + searched, matched)


# ---- an answer that is taken up ----

EOS = 260  # of both tokenizers some token or other


def made(ids: Sequence[int], stopping: StoppingParams) -> list[TokenOutput]:
    """The tokens that nodes would make, to the end of the answer at most."""
    tokens = []
    for index, token_id in enumerate(ids):
        finish = finish_reason(stopping, index, token_id)
        matched = token_id if finish is FinishReason.STOP else None
        tokens.append(TokenOutput(RoomKey(1, 0), index, token_id, 0.0, finish, matched))
        if finish is not None:
            break
    return tokens


IDS = st.lists(st.sampled_from([*range(3, 12), 198, 0xC3 + 3, 0xA9 + 3, 0xF0 + 3, *range(256, 264)]), max_size=30)


@settings(deadline=None, max_examples=300)
@given(
    model=st.sampled_from([BYTES, FALLBACK]),
    ids=IDS | TEXT.map(BYTES.encode),
    stops=st.lists(st.text(alphabet=st.sampled_from("ab é漢"), min_size=1, max_size=3), max_size=3),
    least=st.integers(0, 6),
    most=st.integers(6, 30),
    prompt=st.lists(st.integers(3, 263), max_size=2),
    skip=st.booleans(),
)
def test_an_answer_taken_up_at_any_token_goes_on_as_it_would_have(
    model: TextModel,
    ids: Sequence[int],
    stops: list[str],
    least: int,
    most: int,
    prompt: list[int],
    skip: bool,
) -> None:
    stopping = StoppingParams(max_new_tokens=most, min_new_tokens=least, eos_token_ids=(EOS,))
    options = AnswerOptions(stop=tuple(stops), min_new_tokens=least, skip_special_tokens=skip)
    tokens = made(ids, stopping)
    unbroken = Answer(model, options, prompt)
    shown = [unbroken.extend([token]).text for token in tokens]  # what a client has of each token
    held = unbroken.finish()
    for cut in range(unbroken.tokens + 1):
        taken_up = Answer(model, options, prompt)
        finish = taken_up.resume([token.token_id for token in tokens[:cut]], stopping)
        rest = "" if finish else "".join(taken_up.extend([token]).text for token in tokens[cut:])
        assert "".join(shown[:cut]) + rest + taken_up.finish() == "".join(shown) + held
        assert (taken_up.tokens, taken_up.matched_stop) == (unbroken.tokens, unbroken.matched_stop)
        ends = unbroken.matched_stop is not None or bool(tokens and tokens[-1].finish)
        assert (finish is not None) == (ends and cut == unbroken.tokens and cut > 0)
        if finish and not unbroken.matched_stop:
            assert (finish, taken_up.last.matched_token) == (tokens[-1].finish, tokens[-1].matched_token)  # type: ignore[union-attr]


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(0, 2))
def test_nothing_is_taken_up_behind_the_end_of_an_answer(beyond: int, before: int) -> None:
    for last, stops in ((EOS, ()), (BYTES.encode("b")[0], ("b",))):
        answer = Answer(BYTES, AnswerOptions(stop=stops))
        ids = [*BYTES.encode("c") * before, last, *BYTES.encode("c") * beyond]
        with pytest.raises(InvalidField, match="resumed_token_ids"):
            answer.resume(ids, StoppingParams(max_new_tokens=10, eos_token_ids=(EOS,)))
