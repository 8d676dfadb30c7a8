"""Text that comes in pieces equals text that comes at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.answer import Answer, AnswerOptions
from bootstrap.detokenize import IncrementalDetokenizer
from bootstrap.stop_strings import StopStrings
from bootstrap.text import TextModel
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
