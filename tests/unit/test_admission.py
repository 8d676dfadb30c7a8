from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.admission import Candidate, DecodeState, Holder, Readiness, admit
from engine.core.room_budget import longest_prompt, never_fits
from engine.device.page_allocator import PageAllocator
from prefill_service.adder import Adder
from prefill_service.prefix_cache import PrefixCache
from tests.helpers.golden import Json, cases, expand, make_request


def holder(spec: Json) -> Holder[str]:
    return Holder(spec["rid"], len(expand(spec["ids"])), spec["max_new"], len(expand(spec["out"])))


def candidate(spec: Json) -> Candidate[str]:
    readiness = {"ready": Readiness.READY, "bootstrapping": Readiness.NOT_READY, "failed": Readiness.FAILED}[
        spec["poll"]
    ]
    if spec["aborted"]:
        readiness = Readiness.FAILED
    return Candidate(spec["rid"], len(expand(spec["ids"])), spec["max_new"], readiness, spec.get("priority"))


@pytest.mark.parametrize(("args", "want"), cases("prealloc"))
def test_golden_admission(args: Json, want: Json) -> None:
    decision = admit(
        DecodeState(
            page_size=args["page_size"],
            capacity=args["capacity"],
            reserved=args["reserved"],
            rows=args["rows"],
            metadata_slots=args["metadata_slots"],
            queue=[candidate(spec) for spec in args["queue"]],
            running=[holder(spec) for spec in args.get("running", [])],
            transfer=[holder(spec) for spec in args.get("transfer", [])],
            waiting=[holder(spec) for spec in args.get("waiting", [])],
            retracted=[holder(spec) for spec in args.get("retracted", [])],
            last_prebuilt=args.get("last_prebuilt", 0),
            priorities=args.get("enable_priority", False),
            low_priority_first=args.get("low_first", False),
        )
    )
    assert {
        "budget": decision.budget,
        "resumed": list(decision.resumed),
        "still_retracted": list(decision.still_retracted),
        "blocked_by_retracted": bool(decision.still_retracted),
        "admitted": list(decision.admitted),
        "failed": list(decision.failed),
        "left": list(decision.left),
    } == want


def state(queue: list[Candidate[str]], **changes: object) -> DecodeState[str]:
    base = {"page_size": 16, "capacity": 1024, "reserved": 32, "rows": 8, "metadata_slots": 8, "queue": queue}
    return DecodeState(**(base | changes))  # type: ignore[arg-type]


def test_while_some_stay_retracted_nobody_new_comes_but_failed_ones_leave() -> None:
    queue = [Candidate("a", 16, 16), Candidate("b", 16, 16, Readiness.FAILED)]
    decision = admit(state(queue, retracted=[Holder("x", 100, 50, 10), Holder("y", 1000, 50, 10)]))
    assert decision.resumed == ("x",)
    assert decision.still_retracted == ("y",)
    assert (decision.admitted, decision.failed, decision.left) == ((), ("b",), ("a",))


def test_the_retracted_come_back_in_order() -> None:
    retracted = [Holder("x", 2000, 50, 10), Holder("y", 16, 50, 10)]
    assert admit(state([], retracted=retracted)).still_retracted == ("x", "y"), "y does not overtake x"


def test_alone_a_retracted_one_needs_no_reserve() -> None:
    near_the_end, other = Holder("x", 1000, 50, 10), Holder("y", 16, 50)
    assert admit(state([], retracted=[near_the_end, other])).resumed == ("x",)
    assert admit(state([], retracted=[near_the_end], transfer=[other])).resumed == ()


HOLDERS = st.lists(st.builds(Holder, st.just("h"), st.integers(1, 300), st.integers(1, 300), st.integers(0, 200)))


@given(HOLDERS, HOLDERS, HOLDERS, st.sampled_from([0, 1, 32, 100]))
def test_no_room_is_offered_while_any_stays_retracted(
    running: list[Holder[str]], transfer: list[Holder[str]], retracted: list[Holder[str]], reserved: int
) -> None:
    base = state([], running=running, transfer=transfer, retracted=retracted, reserved=reserved, rows=100)
    decision = admit(base)
    assert decision.budget <= 0 or not decision.still_retracted
    assert len(decision.resumed) + len(decision.still_retracted) == len(retracted)


@pytest.mark.parametrize("changes", [{"rows": 1}, {"metadata_slots": 1}])
def test_rows_and_metadata_slots_bound_admission(changes: dict[str, int]) -> None:
    decision = admit(state([Candidate("a", 16, 16), Candidate("b", 16, 16)], **changes))
    assert (decision.admitted, decision.left) == (("a",), ("b",))


def test_holders_count_as_rows() -> None:
    decision = admit(
        state([Candidate("a", 16, 16)], rows=2, running=[Holder("r", 16, 4)], transfer=[Holder("t", 16, 4)])
    )
    assert decision.admitted == ()


def test_those_without_a_priority_come_last() -> None:
    queue = [Candidate("none", 16, 16), Candidate("low", 16, 16, priority=1), Candidate("high", 16, 16, priority=5)]
    assert admit(state(queue, priorities=True)).admitted == ("high", "low", "none")
    assert admit(state(queue, priorities=True, low_priority_first=True)).admitted == ("low", "high", "none")
    assert admit(state(queue)).admitted == ("none", "low", "high")


@pytest.mark.parametrize(("prompt", "max_new", "fits"), [(992, 32, True), (992, 33, False), (993, 1, False)])
def test_what_never_fits_to_the_token(prompt: int, max_new: int, fits: bool) -> None:
    assert (never_fits(prompt, max_new, 1024, 32, 16) is None) == fits


@given(
    page_size=st.sampled_from([1, 16, 64]),
    pages=st.integers(1, 40),
    reserved=st.integers(0, 300),
    prompt=st.integers(1, 3000),
    max_new=st.integers(1, 6000),
)
def test_never_fits_is_what_an_idle_node_refuses(
    page_size: int, pages: int, reserved: int, prompt: int, max_new: int
) -> None:
    capacity = pages * page_size
    idle = DecodeState(
        page_size=page_size,
        capacity=capacity,
        reserved=reserved,
        rows=1,
        metadata_slots=1,
        queue=[Candidate("a", prompt, max_new)],
    )
    refusal = never_fits(prompt, max_new, capacity, reserved, page_size)
    assert (refusal is None) == (admit(idle).admitted == ("a",))


def test_the_refusal_names_field_value_and_limit() -> None:
    prompt = never_fits(1000, 10, 1024, 32, 16)
    assert prompt is not None
    assert str(prompt) == "prompt tokens is 1000; allowed: at most 992, the room on a decode node"
    answer = never_fits(900, 200, 1024, 32, 16)
    assert answer is not None
    assert answer.metadata["field"] == "stopping.max_new_tokens"
    assert answer.metadata["limit"].startswith("at most 124 after 900 prompt tokens")


@pytest.mark.parametrize("page_size", [1, 16])
def test_longest_prompt_is_what_an_idle_prefill_node_admits(page_size: int) -> None:
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator)
    most = longest_prompt(8, page_size)
    for length in (most, most + 1):
        request = make_request({"rid": "r", "ids": [(0, length)]}, cache, page_size)
        attempt = Adder(cache, allocator, page_size, max_prefill_tokens=4096).admit(request)
        assert attempt.extend == (length if length == most else 0)
        if attempt.extend:
            cache.unlock(request.node)
