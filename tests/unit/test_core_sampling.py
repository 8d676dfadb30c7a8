"""Limits of sampling and stopping, to the last value, and the one rule by which an answer ends."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvalidField
from engine.core.sampling import MAX_STOP_TOKENS, FinishReason, SamplingParams, StoppingParams, finish_reason

TINY = 2.0**-126  # the least that survives the float32 of a message
# field: (values just inside its limits, values just outside, the limit as the message names it)
LIMITS: dict[str, tuple[list[float], list[float], str]] = {
    "temperature": ([0, TINY, 100], [-TINY, 100.00001, math.inf, -math.inf], "0 to 100"),
    "top_p": ([TINY, 1], [-TINY, 1.0000001], "0 to 1"),
    "top_k": ([0, 1, 1048576], [-1, 1048577], "0 to 1048576"),
    "min_p": ([0, 1], [-TINY, 1.0000001], "0 to 1"),
    "repetition_penalty": ([TINY, 1, 2], [-TINY, 2.0000002], "0 to 2"),
    "presence_penalty": ([-2, 2], [-2.0000002, 2.0000002], "-2 to 2"),
    "frequency_penalty": ([-2, 2], [-2.0000002, 2.0000002], "-2 to 2"),
    "seed": ([0, 2**64 - 1], [-1, 2**64], "0 to 18446744073709551615"),
}
INSIDE = [(name, value) for name, (inside, _, _) in LIMITS.items() for value in inside]
OUTSIDE = [(name, value, limit) for name, (_, outside, limit) in LIMITS.items() for value in outside]
NAN = [(name, math.nan, limit) for name, (_, _, limit) in LIMITS.items() if name not in ("top_k", "seed")]
ZERO = [("top_p", 0.0, "above 0, at most 1"), ("repetition_penalty", 0.0, "above 0, at most 2")]


def changed(name: str, value: float) -> SamplingParams:
    return SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_every_field_has_its_limits_here() -> None:
    assert LIMITS.keys() == {field.name for field in fields(SamplingParams)}
    SamplingParams().validate()


@pytest.mark.parametrize(("name", "value"), INSIDE)
def test_values_on_the_limit_are_allowed(name: str, value: float) -> None:
    changed(name, value).validate()


@pytest.mark.parametrize(("name", "value", "limit"), OUTSIDE + NAN + ZERO)
def test_values_beyond_it_are_refused_with_field_value_and_limit(name: str, value: float, limit: str) -> None:
    with pytest.raises(InvalidField) as caught:
        changed(name, value).validate()
    assert str(caught.value) == f"sampling.{name} is {value!r}; allowed: {limit}"
    assert caught.value.metadata == {"field": f"sampling.{name}", "value": repr(value), "limit": limit}


@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -1}, True),
        ({"frequency_penalty": 1}, True),
    ],
)
def test_only_penalties_need_the_tokens_so_far(change: dict[str, float], needed: bool) -> None:
    assert SamplingParams(**change).needs_history is needed  # type: ignore[arg-type]


# ---- stopping ----


@pytest.mark.parametrize(
    "stopping",
    [
        StoppingParams(1),
        StoppingParams(5, min_new_tokens=5),
        StoppingParams(5, stop_token_ids=tuple(range(MAX_STOP_TOKENS))),
        StoppingParams(5, eos_token_ids=tuple(range(1000))),  # the model's own, of whatever number
    ],
)
def test_stopping_within_its_limits(stopping: StoppingParams) -> None:
    stopping.validate()


@pytest.mark.parametrize(
    ("stopping", "message"),
    [
        (StoppingParams(0), "stopping.max_new_tokens is 0; allowed: at least 1"),
        (StoppingParams(-1), "stopping.max_new_tokens is -1; allowed: at least 1"),
        (StoppingParams(5, 6), "stopping.min_new_tokens is 6; allowed: 0 to max_new_tokens (5)"),
        (StoppingParams(5, -1), "stopping.min_new_tokens is -1; allowed: 0 to max_new_tokens (5)"),
        (
            StoppingParams(5, stop_token_ids=tuple(range(MAX_STOP_TOKENS + 1))),
            "stopping.stop_token_ids is 65; allowed: at most 64 ids",
        ),
    ],
)
def test_stopping_beyond_its_limits(stopping: StoppingParams, message: str) -> None:
    with pytest.raises(InvalidField) as caught:
        stopping.validate()
    assert str(caught.value) == message


IDS = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(
    st.builds(
        StoppingParams,
        max_new_tokens=st.integers(1, 8),
        min_new_tokens=st.just(0),
        stop_token_ids=IDS,
        eos_token_ids=IDS,
        ignore_eos=st.booleans(),
    ),
    st.lists(st.integers(0, 9), min_size=8),
    st.integers(0, 8),
)
def test_an_answer_ends_once_and_within_its_limits(free: StoppingParams, tokens: list[int], least: int) -> None:
    """Tokens come as sampled, save for those forbidden at their index."""
    least = min(least, free.max_new_tokens)
    stopping = StoppingParams(
        free.max_new_tokens, least, free.stop_token_ids, free.eos_token_ids, ignore_eos=free.ignore_eos
    )
    stopping.validate()
    ending = {*stopping.stop_token_ids, *(() if stopping.ignore_eos else stopping.eos_token_ids)}
    for index, token in enumerate(tokens):
        forbidden = stopping.forbidden(index)
        assert set(forbidden) == (ending if index < least else set())
        if token in forbidden:
            continue  # masked out: this draw cannot happen
        reason = finish_reason(stopping, index, token)
        if token in ending:
            assert reason is FinishReason.STOP, "an end token ends it, also where the length would have"
            assert index >= least
        else:
            assert reason is (FinishReason.LENGTH if index + 1 >= stopping.max_new_tokens else None)
        if reason is not None:
            return
        assert index + 1 < stopping.max_new_tokens
