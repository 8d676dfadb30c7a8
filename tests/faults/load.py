"""A seeded load: requests that differ in everything that matters, answers checked against a reference as they come."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from kvrelay.v1 import generation_pb2
from kvrelay.v1.types_pb2 import Sampling, Stopping
from tests.helpers.cluster import Answer, Cluster
from tests.helpers.reference import greedy

__all__ = ["Ask", "Load", "Outcome", "Running", "check", "drive"]

HANG_S = 60.0  # a stream still open after so long hangs


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int | None = None  # None: greedy
    salt: str = ""
    routing_key: str = ""  # spreads requests over the prefill nodes, however fast one has been lately
    priority: int | None = None
    may_end: bool = False  # at the end of sequence, so that nobody can know how much memory it will take

    def request(self) -> generation_pb2.GenerateRequest:
        sampling = None
        if self.seed is not None:  # with all that is counted over what came before
            sampling = Sampling(temperature=0.8, top_p=0.95, frequency_penalty=0.3, seed=self.seed)
            sampling.repetition_penalty = 1.1
        stopping = Stopping(max_new_tokens=self.max_new_tokens, ignore_eos=not self.may_end)
        request = Cluster.request(
            self.prompt, None, sampling, stopping, cache_salt=self.salt, routing_key=self.routing_key
        )
        if self.priority is not None:
            request.priority = self.priority
        return request


@dataclass(slots=True)
class Outcome:
    """How one request went. `wrong` says what was wrong with its stream, whatever its status."""

    ask: Ask
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    status: grpc.StatusCode | None = None  # None: it was answered to the end
    details: str = ""
    seconds: float = 0.0
    attempts: int = 0  # that it took to answer it
    pair: tuple[str, str] = ("", "")  # the prefill and the decode node of the last one
    wrong: str = ""


class Load:
    """Requests for one model from one seed, and what their answers must be."""

    def __init__(self, model: Path, seed: int, *, lengths: Sequence[int] = (5, 17, 48, 90, 150, 230)):
        """lengths: of prompts, in tokens. Half of the prompts begin as another does."""
        self._model = model
        self._random = random.Random(seed)
        self._lengths = lengths
        self._stems: list[tuple[int, ...]] = []
        self._references: dict[Ask, list[int]] = {}  # by bare request
        self._salts = itertools.count()

    def ask(self, *, new_tokens: tuple[int, int] = (20, 40), length: int | None = None, sampled: bool = False) -> Ask:
        """The next request: fresh, or sharing a stem with earlier ones, under one of two salts or none."""
        draw = self._random
        length = draw.choice(self._lengths) if length is None else length
        prompt = tuple(draw.randrange(3, 259) for _ in range(length))
        if self._stems and draw.random() < 0.5:
            stem = draw.choice(self._stems)
            prompt = (*stem[: 2 * length // 3], *prompt)[:length]
        self._stems.append(prompt)
        seed = draw.randrange(1 << 32) if sampled else None
        return Ask(prompt, draw.randint(*new_tokens), seed, draw.choice(("", "", "salt a", "salt b")))

    def asks(self, count: int, *, new_tokens: tuple[int, int] = (20, 40), sampled: float = 0.0) -> list[Ask]:
        """sampled: the part of them that draw their tokens; their reference has to be learnt."""
        return [self.ask(new_tokens=new_tokens, sampled=self._random.random() < sampled) for _ in range(count)]

    def again(self, asks: Sequence[Ask]) -> list[Ask]:
        """The same requests under one new salt: the same answers, and nothing of their prompts cached yet."""
        salt = f"salt {next(self._salts)}"
        return [replace(ask, salt=salt, routing_key=f"{salt} {i}") for i, ask in enumerate(asks)]

    def learn(self, cluster: Cluster, ask: Ask) -> None:
        """Take what a cluster at rest answers to a request that draws its tokens as its reference."""
        bare = _bare(ask)
        if ask.seed is not None and bare not in self._references:
            answer = Answer.collect(cluster.generation.Generate(ask.request(), timeout=HANG_S))
            self._references[bare] = answer.token_ids

    def reference(self, ask: Ask) -> list[int]:
        """What must be answered. The first call for a greedy request has transformers work it out."""
        bare = _bare(ask)
        if bare not in self._references:
            assert ask.seed is None, "nobody has learnt what this request must be answered"
            self._references[bare] = greedy(self._model, ask.prompt, ask.max_new_tokens, ignore_eos=not ask.may_end)
        return self._references[bare]


def _bare(ask: Ask) -> Ask:
    """Without what changes no answer."""
    return replace(ask, salt="", routing_key="", priority=None)


class Running:
    """Requests under way, a thread each."""

    def __init__(self, cluster: Cluster, asks: Sequence[Ask], load: Load, timeout: float):
        self.outcomes = [Outcome(ask) for ask in asks]
        for one in self.outcomes:
            load.reference(one.ask)  # now: while the cluster works it would take the cores from it
        self._threads = [
            threading.Thread(target=self._read, args=(cluster, one, load.reference(one.ask), timeout), daemon=True)
            for one in self.outcomes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    @property
    def tokens(self) -> int:
        """That have come so far, of all."""
        return sum(len(one.token_ids) for one in self.outcomes)

    @staticmethod
    def _read(cluster: Cluster, one: Outcome, reference: Sequence[int], timeout: float) -> None:
        began = time.monotonic()
        try:
            for message in cluster.generation.Generate(one.ask.request(), timeout=timeout):
                if one.finished:
                    one.wrong = one.wrong or "a message came after `finished`"
                if message.HasField("delta"):
                    _take(one, message.delta, reference)
                if message.HasField("finished"):
                    timing = message.finished.timing
                    one.finished, one.attempts = True, timing.attempts
                    one.pair = (timing.prefill_node, timing.decode_node)
            if not one.finished:
                one.wrong = one.wrong or "the stream ended without `finished`"
        except grpc.RpcError as error:
            one.status, one.details = error.code(), error.details() or ""
        except Exception as error:
            one.wrong = f"{type(error).__name__}: {error}"
        one.seconds = time.monotonic() - began


def _take(one: Outcome, delta: generation_pb2.Delta, reference: Sequence[int]) -> None:
    index = len(one.token_ids)
    if delta.index != index:
        one.wrong = one.wrong or f"index {delta.index} came where {index} was due"
    one.token_ids += delta.token_ids
    due = list(reference[index : len(one.token_ids)])
    if list(delta.token_ids) != due:
        one.wrong = one.wrong or f"from index {index}: {list(delta.token_ids)} came, {due} was due"


@contextmanager
def drive(cluster: Cluster, asks: Sequence[Ask], load: Load, timeout: float = HANG_S) -> Iterator[Running]:
    """Run requests, all at once, from the beginning of the block; at its end wait until each has ended."""
    running = Running(cluster, asks, load, timeout)
    running.start()
    try:
        yield running
    finally:
        running.join()


def check(outcomes: Sequence[Outcome], load: Load, *, allowed: Collection[grpc.StatusCode] = ()) -> None:
    """Every request was answered as its reference says, or ended with an allowed status after a right beginning."""
    for one in outcomes:
        assert not one.wrong, f"{one.wrong}; {one}"
        if one.status is not None:
            assert one.status in allowed, f"{one.status}: {one.details}; {one}"
        else:
            assert one.token_ids == load.reference(one.ask)
