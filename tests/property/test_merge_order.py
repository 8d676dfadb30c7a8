"""Every index once and in order, whatever order tokens come in and however often."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.merge import TokenMerge
from engine.core.types import RoomKey, TokenOutput

KEY = RoomKey(1, 0)


def token(index: int) -> TokenOutput:
    return TokenOutput(KEY, index, index, 0.0)


@settings(deadline=None)
@given(st.integers(0, 30).flatmap(lambda n: st.tuples(st.just(n), st.permutations([*range(n), *range(n // 2)]))))
def test_any_order_with_duplicates(case: tuple[int, list[int]]) -> None:
    count, order = case
    merge = TokenMerge()
    given_out = [ready.index for index in order for ready in merge.add(token(index))]
    assert given_out == list(range(count))


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=40))
def test_never_a_gap_and_never_twice(order: list[int]) -> None:
    merge = TokenMerge()
    seen: set[int] = set()
    given_out: list[int] = []
    for index in order:
        given_out += [ready.index for ready in merge.add(token(index))]
        seen.add(index)
        first_gap = next(i for i in range(14) if i not in seen)
        assert given_out == list(range(first_gap)), "all there is, and nothing early"


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=20), st.lists(st.integers(0, 12), max_size=20))
def test_a_new_attempt_makes_early_tokens_again(before: list[int], after: list[int]) -> None:
    merge = TokenMerge()
    given_out = [ready.index for index in before for ready in merge.add(token(index))]
    merge.restart()
    reached = merge.next_index
    given_out += [ready.index for index in after for ready in merge.add(token(index))]
    assert given_out == list(range(merge.next_index))
    assert set(range(reached, merge.next_index)) <= set(after)
