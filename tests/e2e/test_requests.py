"""What clients may ask for and get wrong, and what becomes of the cluster: one real cluster for all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvrelay.v1 import generation_pb2_grpc
from kvrelay.v1.generation_pb2 import (
    AbortRequest,
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    GetModelRequest,
    ResponseOptions,
    TokenizeRequest,
)
from kvrelay.v1.types_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Sampling,
    Stopping,
)
from rpc.errors import from_rpc_error
from tests.helpers.cluster import Answer, Cluster, assert_eventually, cluster
from tests.helpers.models import EOS_ID, VOCAB_SIZE, tiny_model
from tests.helpers.reference import greedy

GENERATE = "/kvrelay.v1.Generation/Generate"
PAGES, PAGE_SIZE, RESERVED = 128, 16, 32


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("cluster"),
        model,
        cold=True,
        node_flags=("--page-size", str(PAGE_SIZE), "--num-pages", str(PAGES)),
        prefill_flags=("--chunk-size", "128"),
        decode_flags=("--reserved-decode-tokens", str(RESERVED)),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def leaves_no_trace(served: Cluster) -> Iterator[None]:
    """Whatever a test did: the next request works, and all pages are free or cached."""
    yield
    assert len(served.generate([5, 6, 7], max_new_tokens=3).token_ids) == 3
    served.settle()


def prompt(length: int, first: int = 10) -> list[int]:
    return [3 + (first + 7 * i) % 250 for i in range(length)]


# ---- what works ----


def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(served: Cluster) -> None:
    def ask(seed: int) -> Answer:
        sampling = Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=seed, frequency_penalty=0.3)
        return served.generate(prompt(60), max_new_tokens=24, sampling=sampling)

    alone = [ask(seed).token_ids for seed in range(6)]
    assert len({tuple(tokens) for tokens in alone}) > 1
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(ask, [*range(6), *range(6)]))
    assert [answer.token_ids for answer in crowd] == alone + alone


def test_text_is_the_tokens_decoded(served: Cluster) -> None:
    answer = served.generate("a prompt, as text", max_new_tokens=20)
    reply = served.generation.Detokenize(DetokenizeRequest(token_ids=answer.token_ids, skip_special_tokens=True))
    assert answer.text == reply.text
    model_info = served.generation.GetModel(GetModelRequest())
    assert (model_info.vocab_size, model_info.page_size, model_info.chat_template) == (VOCAB_SIZE, PAGE_SIZE, True)


def test_chat_goes_through_the_template(served: Cluster, model: Path) -> None:
    chat = Chat(messages=[ChatMessage(role="user", content="hello")])
    ids = list(served.generation.Tokenize(TokenizeRequest(chat=chat)).token_ids)
    request = GenerateRequest(
        chat=chat, sampling=Sampling(temperature=0), stopping=Stopping(max_new_tokens=8, ignore_eos=True)
    )
    assert Answer.collect(served.generation.Generate(request)).token_ids == greedy(model, ids, 8)


def test_logprobs_are_probabilities(served: Cluster) -> None:
    answer = served.generate(prompt(20), max_new_tokens=6, response=ResponseOptions(logprobs=True))
    assert len(answer.logprobs) == 6
    assert all(logprob <= 0 for logprob in answer.logprobs)


def test_stop_token_ends_the_answer(served: Cluster, model: Path) -> None:
    free = greedy(model, prompt(33), 12)
    stop_at = next(i for i in range(1, 12) if free[i] not in free[:i])
    answer = served.generate(
        prompt(33), stopping=Stopping(max_new_tokens=12, stop_token_ids=[free[stop_at]], ignore_eos=True)
    )
    assert answer.token_ids == free[: stop_at + 1]
    assert answer.finished.reason == FINISH_REASON_STOP
    assert answer.finished.stop_token == free[stop_at]


def test_first_token_can_be_the_last(served: Cluster, model: Path) -> None:
    token = greedy(model, prompt(40), 1)[0]
    one = served.generate(prompt(40), max_new_tokens=1)
    assert (one.token_ids, one.finished.reason) == ([token], FINISH_REASON_LENGTH)
    stopped = served.generate(prompt(40), stopping=Stopping(max_new_tokens=9, stop_token_ids=[token], ignore_eos=True))
    assert (stopped.token_ids, stopped.finished.reason) == ([token], FINISH_REASON_STOP)


def test_min_new_tokens_holds_the_end_back(served: Cluster) -> None:
    everything = list(range(VOCAB_SIZE - 40))  # as stop tokens: the answer would end at once
    stopping = Stopping(max_new_tokens=6, min_new_tokens=4, stop_token_ids=everything[:64], ignore_eos=True)
    answer = served.generate(prompt(12), stopping=stopping)
    assert len(answer.token_ids) >= 5 or answer.finished.reason == FINISH_REASON_LENGTH
    assert not set(answer.token_ids[:4]) & set(everything[:64])


def test_stop_string_ends_the_text(served: Cluster) -> None:
    free = served.generate(prompt(25), max_new_tokens=30)
    stop = free.text[4:7]
    answer = served.generate(prompt(25), stopping=Stopping(max_new_tokens=30, stop=[stop], ignore_eos=True))
    assert answer.text == free.text[: free.text.index(stop)]
    assert (answer.finished.reason, answer.finished.stop) == (FINISH_REASON_STOP, stop)


def test_end_of_sequence_ends_the_answer_unless_ignored(served: Cluster, model: Path) -> None:
    answers = [served.generate(prompt(9, first), stopping=Stopping(max_new_tokens=60)).token_ids for first in range(4)]
    assert answers == [greedy(model, prompt(9, first), 60, ignore_eos=False) for first in range(4)]
    for tokens in answers:
        assert EOS_ID not in tokens[:-1]


def test_more_requests_than_fit_at_once_wait_their_turn(served: Cluster, model: Path) -> None:
    """Twelve requests of 30 pages each on pools of 128: they queue for decode pages, and none is lost."""
    prompts = [prompt(440, first) for first in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda p: served.generate(p, max_new_tokens=40), prompts))
    assert [answer.token_ids for answer in answers] == [greedy(model, p, 40) for p in prompts]


# ---- what is refused ----


def status(call: grpc.Call | Iterator[object]) -> tuple[grpc.StatusCode, str]:
    """Code and offending field (or reason) of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)  # type: ignore[arg-type]
    named = from_rpc_error(caught.value)
    return caught.value.code(), named.metadata.get("field", named.reason)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": Sampling(temperature=-1)}, "sampling.temperature"),
        ({"sampling": Sampling(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": Sampling(top_p=0)}, "sampling.top_p"),
        ({"sampling": Sampling(top_p=1.5)}, "sampling.top_p"),
        ({"sampling": Sampling(min_p=-0.1)}, "sampling.min_p"),
        ({"sampling": Sampling(repetition_penalty=0)}, "sampling.repetition_penalty"),
        ({"sampling": Sampling(presence_penalty=3)}, "sampling.presence_penalty"),
        ({"sampling": Sampling(frequency_penalty=-3)}, "sampling.frequency_penalty"),
        ({"stopping": Stopping(max_new_tokens=0)}, "stopping.max_new_tokens"),
        ({"stopping": Stopping(max_new_tokens=4, min_new_tokens=5)}, "stopping.min_new_tokens"),
        ({"stopping": Stopping(max_new_tokens=4, stop=[""])}, "stopping.stop"),
        ({"stopping": Stopping(max_new_tokens=4, stop=["x"] * 17)}, "stopping.stop"),
        ({"stopping": Stopping(max_new_tokens=4, stop_token_ids=range(65))}, "stopping.stop_token_ids"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"routing_key": "x" * 257}, "routing_key"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_values_out_of_range(served: Cluster, change: dict[str, object], field: str) -> None:
    request = Cluster.request(prompt(8), **change)  # type: ignore[arg-type]
    assert status(served.generation.Generate(request, timeout=20)) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_empty_prompts(served: Cluster) -> None:
    requests = [
        GenerateRequest(),
        GenerateRequest(text=""),
        GenerateRequest(token_ids={}),
        GenerateRequest(chat=Chat()),
    ]
    for request in requests:
        code, _ = status(served.generation.Generate(request, timeout=20))
        assert code == grpc.StatusCode.INVALID_ARGUMENT


def test_unknown_token_id(served: Cluster) -> None:
    request = Cluster.request([5, VOCAB_SIZE])
    assert status(served.generation.Generate(request, timeout=20)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "token_ids",
    )


def test_unknown_model(served: Cluster) -> None:
    code, _ = status(served.generation.Generate(Cluster.request(prompt(4), model="gpt-none"), timeout=20))
    assert code == grpc.StatusCode.NOT_FOUND


def test_prompt_that_can_never_fit(served: Cluster) -> None:
    capacity = PAGES * PAGE_SIZE
    for length in (capacity - RESERVED + 1, capacity + 1, 4 * capacity):
        code, _ = status(served.generation.Generate(Cluster.request(prompt(length)), timeout=20))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
    code, field = status(served.generation.Generate(Cluster.request(prompt(1500), 1000), timeout=20))
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_new_tokens")


def test_longest_prompt_that_fits_is_served(served: Cluster, model: Path) -> None:
    longest = prompt(PAGES * PAGE_SIZE - 2 * RESERVED)
    assert served.generate(longest, max_new_tokens=8).token_ids == greedy(model, longest, 8)


@pytest.mark.parametrize(
    "data",
    [
        b"\x1a\x02\xff\xfe",  # field 3 (text), two bytes that are no UTF-8
        b"\x1a\x7fshort",  # a string that is said to be longer than the message
        b"\xff\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_no_message(served: Cluster, data: bytes) -> None:
    raw = served.channel.unary_stream(GENERATE, bytes, bytes)
    assert status(raw(data, timeout=20)) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED")


def test_message_of_ten_megabytes(served: Cluster) -> None:
    code, _ = status(served.generation.Generate(Cluster.request("x" * 10_000_000), timeout=20))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_deadline_already_past(served: Cluster) -> None:
    code, _ = status(served.generation.Generate(Cluster.request(prompt(8)), timeout=0))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED


def test_duplicate_of_a_live_request(served: Cluster) -> None:
    first = served.generation.Generate(Cluster.request(prompt(8), 400, request_id="twin"), timeout=60)
    next(first)
    code, _ = status(served.generation.Generate(Cluster.request(prompt(8), request_id="twin"), timeout=20))
    assert code == grpc.StatusCode.ALREADY_EXISTS
    served.generation.Abort(AbortRequest(request_id="twin"))
    assert [m.finished.reason for m in first if m.HasField("finished")] == [FINISH_REASON_ABORT]
    assert len(served.generate(prompt(8), max_new_tokens=2, request_id="twin").token_ids) == 2


def test_abort_of_nothing(served: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        served.generation.Abort(AbortRequest(request_id="nobody"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


# ---- what is given up ----


@pytest.mark.parametrize("wait_for", ["nothing", "started", "tokens"])
def test_cancelled_requests_leave_nothing_behind(served: Cluster, wait_for: str) -> None:
    """Cancelled while queued or prefilling, with the first token, and while decoding; many at once."""
    streams = [served.generation.Generate(Cluster.request(prompt(700, first), 500), timeout=60) for first in range(6)]
    if wait_for != "nothing":
        next(streams[0])
    if wait_for == "tokens":
        for _ in range(5):
            next(streams[0])
    for stream in streams:
        stream.cancel()
    served.settle()


def test_deadline_ends_a_request_everywhere(served: Cluster) -> None:
    code, _ = status(served.generation.Generate(Cluster.request(prompt(300), 1500), timeout=0.5))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    served.settle()


def test_client_that_vanishes(served: Cluster) -> None:
    """A client whose connection drops mid-stream is a cancelled request."""
    channel = grpc.insecure_channel(served.address)
    stream = generation_pb2_grpc.GenerationStub(channel).Generate(Cluster.request(prompt(50), 1500))
    next(stream)
    channel.close()
    assert_eventually(lambda: not served.live(), "the request is gone")


def test_cancel_in_a_storm(served: Cluster, model: Path) -> None:
    """Requests cancelled at random moments beside one that must not notice."""
    with ThreadPoolExecutor(1) as pool:
        steady = pool.submit(served.generate, prompt(200), max_new_tokens=150)
        for i in range(25):
            stream = served.generation.Generate(Cluster.request(prompt(30 + 25 * i, i), 200), timeout=60)
            time.sleep(0.004 * (i % 7))
            stream.cancel()
        assert steady.result(60).token_ids == greedy(model, prompt(200), 150)
