"""What a prefill node says of its rate, and what routing makes of it: who is held up once gets its share back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from bootstrap.registry import Registry
from bootstrap.routing import choose_prefill
from engine.core.clock import ManualClock
from engine.core.messages import NodeStats
from engine.core.types import Role
from prefill_service.compute_rate import ComputeRate
from tests.helpers.front_door import FINGERPRINT, MODEL, RecordingLink, registration

FORWARD_S, TOKEN_S = 0.01, 1 / 20_000  # a forward costs so much, whatever it computes, and so much for each token


def measured(*forwards: tuple[int, float]) -> float:
    rate = ComputeRate()
    for tokens, seconds in forwards:
        rate.observe(tokens, seconds)
    return rate.value


def test_a_forward_weighs_by_its_tokens() -> None:
    assert measured() == 0.0
    assert measured((0, 1.0), (100, 0.0)) == 0.0, "of neither a rate can be told"
    assert measured((600, 0.1)) == pytest.approx(6000)
    assert measured((2048, 0.1)) * 0.8 < measured(*[(2048, 0.1)] * 20, (2048, 10.0)), "held up for long"
    assert measured((2048, 0.1), *[(8, 0.02)] * 100) > 0.6 * 20480, "short ones, of 400 tokens a second"
    slow = measured(*[(2048, 0.1)] * 20, *[(2048, 1.0)] * 20)
    assert slow == pytest.approx(2048, rel=0.3), "one that goes on being slow is seen to be"


class Pool:
    """Prefill nodes, and a request a second that is computed before the next one comes: queues tell nothing."""

    def __init__(self, *slowness: Callable[[float], float], lengths: Sequence[int]):
        """slowness: of each node, how many times longer than usual a forward takes at this time of the clock."""
        self.clock = ManualClock()
        self._registry = Registry(MODEL, FINGERPRINT, self.clock)
        self._nodes = [
            (self._registry.add(registration(Role.PREFILL, f"prefill-{i}"), RecordingLink()), ComputeRate(), slow)
            for i, slow in enumerate(slowness)
        ]
        self._random, self._lengths = random.Random(1), lengths

    def serve(self, requests: int) -> float:
        """The last node's share of so many more requests."""
        chosen = Counter[str]()
        for _ in range(requests):
            self.clock.advance(1.0)
            tokens = self._random.choice(self._lengths)
            view = choose_prefill([node.prefill_view() for node, _, _ in self._nodes], tokens, (), 16)
            assert view is not None
            node, rate, slow = next(one for one in self._nodes if one[0] is self._registry.chosen(view.node_id))
            rate.observe(tokens, (FORWARD_S + TOKEN_S * tokens) * slow(self.clock()))
            self._registry.update(node, NodeStats(serving=True, tokens_per_second=rate.value))
            chosen[node.node_id] += 1
        return chosen[self._nodes[-1][0].node_id] / requests


def as_ever(now: float) -> float:
    return 1.0


LENGTHS = pytest.mark.parametrize("lengths", [(800,), (30, 90, 500, 2048), (6, 9, 12)], ids=["alike", "mixed", "short"])


@LENGTHS
@pytest.mark.parametrize("seconds", [1, 2, 100], ids=["one forward", "two", "all for a while"])
def test_a_node_that_was_held_up_has_its_share_again(lengths: Sequence[int], seconds: int) -> None:
    pool = Pool(as_ever, lambda now: 50.0 if 100 < now <= 100 + seconds else 1.0, lengths=lengths)
    pool.serve(3000)
    assert pool.serve(400) == pytest.approx(0.5, abs=0.15)


@LENGTHS
def test_a_node_that_began_slowly_gets_its_share(lengths: Sequence[int]) -> None:
    pool = Pool(as_ever, lambda now: 50.0 if now <= 3 else 1.0, lengths=lengths)
    pool.serve(3000)
    assert pool.serve(400) == pytest.approx(0.5, abs=0.15)


def test_a_node_that_computes_the_rests_of_cached_prompts_is_no_slower() -> None:
    hot, cold = ComputeRate(), ComputeRate()
    for number in range(400):
        hot.observe(20, FORWARD_S + 20 * TOKEN_S)
        if number % 40 == 0:
            for rate in (hot, cold):
                rate.observe(1000, FORWARD_S + 1000 * TOKEN_S)
    assert hot.value == pytest.approx(cold.value)


@pytest.mark.parametrize(("times", "most"), [(1.5, 0.06), (4.0, 0.02), (10.0, 0.01)])
def test_a_slower_node_stays_slower(times: float, most: float) -> None:
    pool = Pool(as_ever, lambda now: times, lengths=(800,))
    pool.serve(100)
    assert 0 < pool.serve(1000) < most, "it is tried, now and then"
