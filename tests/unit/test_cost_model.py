from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_service.cost_model import ENOUGH, CostModel, pairs

FIXED, PER_TOKEN, PER_PAIR = 8e-3, 5e-5, 2e-9


def law(tokens: int, history: int, scale: float = 1.0) -> float:
    return scale * (FIXED + PER_TOKEN * tokens + PER_PAIR * pairs(tokens, history))


def run(model: CostModel, rng: random.Random, forwards: int, scale: float = 1.0, noise: float = 0.05) -> None:
    """Forwards of many sizes, half of them whole chunks, as a busy node has them."""
    for _ in range(forwards):
        tokens = rng.choice([2048, rng.randrange(16, 2048)])
        history = rng.choice([0, rng.randrange(60_000)])
        model.observe(tokens, pairs(tokens, history), law(tokens, history, scale) * rng.gauss(1, noise))


def exact(fixed: float = FIXED, per_token: float = PER_TOKEN, per_pair: float = PER_PAIR) -> CostModel:
    """A model that has seen a law without noise."""
    model, rng = CostModel(), random.Random(0)
    for _ in range(100):
        tokens, history = rng.randrange(1, 4096), rng.randrange(50_000)
        n = pairs(tokens, history)
        model.observe(tokens, n, fixed + per_token * tokens + per_pair * n)
    return model


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_found_again_in_noisy_measurements(seed: int) -> None:
    model = CostModel()
    run(model, random.Random(seed), 300)
    assert model.fixed == pytest.approx(FIXED, rel=0.25)
    assert model.per_token == pytest.approx(PER_TOKEN, rel=0.1)
    assert model.per_pair == pytest.approx(PER_PAIR, rel=0.05)


def test_nothing_is_known_before_anything_ran() -> None:
    model = CostModel()
    assert (model.measured, model.seconds(100, 100.0)) == (False, 0.0)
    run(model, random.Random(0), ENOUGH - 1)
    assert not model.measured
    run(model, random.Random(0), 1)
    assert model.measured


def test_the_first_slow_forwards_weigh_little() -> None:
    model, rng = CostModel(), random.Random(1)
    run(model, rng, 3, scale=200)
    run(model, rng, ENOUGH)
    assert model.seconds(1000, pairs(1000, 5000)) == pytest.approx(law(1000, 5000), rel=0.15)


@pytest.mark.parametrize("scale", [0.4, 2.5])
def test_a_change_is_followed(scale: float) -> None:
    model, rng = CostModel(), random.Random(2)
    run(model, rng, 300)
    run(model, rng, 400, scale)
    for tokens, history in ((100, 0), (2048, 0), (2048, 50_000)):
        assert model.seconds(tokens, pairs(tokens, history)) == pytest.approx(law(tokens, history, scale), rel=0.1)


def test_forwards_that_are_all_alike_are_put_down_to_their_tokens() -> None:
    """Nothing tells the costs apart; a made-up fixed cost would make small chunks look like waste."""
    model = CostModel()
    for _ in range(50):
        model.observe(2048, pairs(2048, 0), 0.1)
    assert model.seconds(2048, pairs(2048, 0)) == pytest.approx(0.1, rel=1e-3)
    assert model.fixed < 0.001
    assert model.per_token == pytest.approx(0.1 / 2048, rel=0.01)


@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.integers(0, 200_000), st.floats(0, 1e4) | st.floats(1e-9, 1e-3)),
        max_size=40,
    )
)
def test_costs_are_never_negative(forwards: list[tuple[int, int, float]]) -> None:
    model = CostModel()
    for tokens, history, seconds in forwards:
        model.observe(tokens, pairs(tokens, history), seconds)
        assert min(model.fixed, model.per_token, model.per_pair) >= 0


@given(
    fixed=st.sampled_from([0.0, FIXED]),
    per_token=st.sampled_from([0.0, PER_TOKEN]),
    per_pair=st.sampled_from([0.0, PER_PAIR]),
    target=st.floats(1e-3, 2),
    history=st.integers(0, 100_000),
    page_size=st.sampled_from([1, 16, 64]),
    most=st.integers(64, 10_000),
)
def test_the_chunk_is_the_longest_within_the_target(
    fixed: float, per_token: float, per_pair: float, target: float, history: int, page_size: int, most: int
) -> None:
    model = exact(fixed, per_token, per_pair)
    chunk = model.chunk_for(target, history, page_size, most)
    assert chunk % page_size == 0
    assert page_size <= chunk <= most
    slack = 1e-9 + 1e-6 * target  # rounding
    if chunk > page_size:
        assert model.seconds(chunk, pairs(chunk, history)) <= target + slack
    if chunk + page_size <= most:
        assert model.seconds(chunk + page_size, pairs(chunk + page_size, history)) > target - slack


def test_without_any_cost_the_chunk_is_as_long_as_it_may_be() -> None:
    assert CostModel().chunk_for(0.1, 0, 16, 1000) == 992
