"""The guess of how long answers get: its start, its fall, and what a retraction makes of it."""

from __future__ import annotations

import pytest

from prefill_service.adder import DecodeRow, running_growth
from unified_service.new_token_ratio import NewTokenRatio


def test_falls_in_a_straight_line_to_a_seventh_of_its_start() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == 0.7
    for _ in range(300):
        ratio.decoded()
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(300):
        ratio.decoded()
    assert ratio.value == pytest.approx(0.098)
    ratio.decoded()
    assert ratio.value == pytest.approx(0.098)


@pytest.mark.parametrize(("conservativeness", "start"), [(0.0, 0.0), (0.5, 0.35), (1.2, 0.84), (2.0, 1.0)])
def test_conservativeness_multiplies_the_start_up_to_1(conservativeness: float, start: float) -> None:
    ratio = NewTokenRatio(conservativeness)
    assert ratio.value == pytest.approx(start)
    for _ in range(600):
        ratio.decoded()
    assert ratio.value == pytest.approx(0.14 * start)


def test_a_retraction_learns_from_those_kept() -> None:
    ratio = NewTokenRatio(1.0)
    ratio.retracted([DecodeRow(100, 30), DecodeRow(99, 10)])
    assert ratio.value == pytest.approx((30 + 10 + 2 * 20) / 200)
    ratio.decoded()
    assert ratio.value == pytest.approx(0.4 - (0.7 - 0.098) / 600)
    ratio.retracted([DecodeRow(10, 9)])
    assert ratio.value == 1.0


def test_growth_of_what_ignores_the_end_is_certain() -> None:
    rows = [DecodeRow(100, 40), DecodeRow(100, 90, ignore_eos=True), DecodeRow(9000, 0)]
    assert running_growth(rows, 0.5) == 30 + 10 + 2048
