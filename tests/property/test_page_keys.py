"""Equal keys mean equal tokens from the very start, under one page size and one salt; nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.core.page_keys import KEY_BYTES, page_keys

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
PAGE = st.integers(1, 9)
SALT = st.text(max_size=6)


@given(TOKENS, PAGE, SALT)
def test_one_key_for_each_whole_page(tokens: list[int], page: int, salt: str) -> None:
    keys = page_keys(tokens, page, salt)
    assert len(keys) == len(tokens) // page
    assert all(len(key) == KEY_BYTES for key in keys)
    assert len(set(keys)) == len(keys), "each key names all that is before it, too"


@given(TOKENS, PAGE, SALT, st.integers(0, 40))
def test_however_much_is_known_so_far_the_keys_are_the_same(tokens: list[int], page: int, salt: str, cut: int) -> None:
    """A prompt, and the same prompt with the tokens of an earlier attempt behind it, share their pages."""
    part = page_keys(tuple(tokens[:cut]), page, salt)
    assert page_keys(tokens, page, salt)[: len(part)] == part


@given(TOKENS, TOKENS, PAGE)
def test_keys_agree_exactly_as_far_as_the_tokens_do(one: list[int], other: list[int], page: int) -> None:
    for i, (a, b) in enumerate(zip(page_keys(one, page), page_keys(other, page), strict=False), start=1):
        assert (a == b) == (one[: i * page] == other[: i * page])


@given(TOKENS, st.data())
def test_a_changed_token_changes_all_keys_from_there_on(tokens: list[int], data: st.DataObject) -> None:
    assume(tokens)
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = page_keys(tokens, 4), page_keys(changed, 4)
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


@given(TOKENS, st.tuples(PAGE, SALT), st.tuples(PAGE, SALT))
def test_salts_and_page_sizes_share_nothing(tokens: list[int], one: tuple[int, str], other: tuple[int, str]) -> None:
    assume(one != other)
    assert not set(page_keys(tokens, *one)) & set(page_keys(tokens, *other))


def test_keys_are_the_same_in_every_process() -> None:
    """Front door and nodes are different processes, and caches outlive front doors: this must never change."""
    assert [key.hex() for key in page_keys(range(8), 4, "salt")] == [
        "021d72aa6157b03404a1af1a642b7fb9",
        "ef8948e6c910c2b1a5b6e798c87d215e",
    ]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_beyond_32_bits_are_no_token_ids(token: int) -> None:
    with pytest.raises(OverflowError):
        page_keys([token], 1)
