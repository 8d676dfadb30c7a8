"""What a hand-off costs, side by side in one run.

    python benchmarks/handoff.py [--lengths 512,2048] [--rounds 5] [--model smollm2-135m]

A cluster of one prefill and one decode node, another with --kv-checksum, a bare process that runs the same prompt
through the same runner, and a pair of processes that write the same pages with plain NIXL calls take turns, round after
round, each with a thread of its own and nothing else running. Printed are medians, and:

    ttft ratio     time to first token at the client, through the relay, over the bare process's prefill and sampling
    hand-off       from the end of the last chunk's forward to the start of the first decode step, over the prefill
    relay ratio    bytes a second while writes of the request were in progress, over those of the plain writes:
                   of a prompt that is computed, whose writes share the machine with the next chunk, and of the same
                   prompt once more, whose pages are cached and all leave at once
    checked        the cached prompt's bytes a second with checksums, over those without; and its time from Generate to
                   the end, over that without, since the decode node checks pages after they were written

Every prompt is new to the cache (a salt of its own), so each is computed whole the first time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import grpc

from cli.cluster import Cluster, Interrupts
from cli.plan import claim_addresses, plan_cluster
from engine.core.node_config import NodeConfig
from engine.core.types import Role
from kvrelay.v1 import generation_pb2 as pb
from kvrelay.v1 import generation_pb2_grpc, types_pb2

NEW_TOKENS = 8
VOCABULARY = range(100, 40_000)  # ordinary tokens of the demo model
DEADLINE_S = 300.0


def bare(pipe: Connection, config: NodeConfig, chunk_size: int) -> None:
    """Answers a prompt with the seconds that prefilling it and sampling a token took."""
    from engine.core.sampling import SamplingParams
    from engine.device.batch import Row, build_batch
    from engine.device.sampler import sample
    from engine.device.setup import set_up_device

    device = set_up_device(config, lambda line: None)
    pages = range(device.pool.num_pages)
    greedy = SamplingParams(temperature=0.0)
    pipe.send("ready")
    while (prompt := pipe.recv()) is not None:
        began = time.perf_counter()
        for start in range(0, len(prompt), chunk_size):
            chunk = prompt[start : start + chunk_size]
            is_last = start + chunk_size >= len(prompt)
            batch = build_batch([Row(chunk, start, pages, is_last)], config.page_size)
            logits = device.runner.forward(batch)
        sample(logits, [greedy], [0], [()], [None])
        pipe.send(time.perf_counter() - began)


class PlainPool:
    """Memory of `pages` pages registered with a plain NIXL agent."""

    def __init__(self, name: str, pages: int, page_bytes: int):
        import nixl
        import torch

        self.memory = torch.ones(pages * page_bytes, dtype=torch.uint8)
        self.agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        base = self.memory.data_ptr()
        self.agent.register_memory([(base, self.memory.nbytes, 0, "")], "DRAM")
        self.descriptors = [(base + i * page_bytes, page_bytes, 0) for i in range(pages)]


def plain_receiver(pipe: Connection, pages: int, page_bytes: int) -> None:
    """Owns the target of the plain writes; answers when their notice has come."""
    pool = PlainPool("plain-receiver", pages, page_bytes)
    pipe.send((pool.agent.get_agent_metadata(), pool.descriptors))
    while pipe.recv() is not None:
        while not pool.agent.get_new_notifs():
            time.sleep(2e-4)  # as the decode node polls
        pipe.send("arrived")


def plain_sender(pipe: Connection, receiver: Connection, pages: int, page_bytes: int) -> None:
    """Answers a number of pages with the seconds that one NIXL write of them took, posted to terminal."""
    pool = PlainPool("plain-sender", pages, page_bytes)
    metadata, theirs = receiver.recv()
    peer = pool.agent.add_remote_agent(metadata)
    local = pool.agent.prep_xfer_dlist("NIXL_INIT_AGENT", pool.descriptors, "DRAM")
    remote = pool.agent.prep_xfer_dlist(peer, theirs, "DRAM")
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        ours = random.sample(range(pages), count)  # as scattered as pages are after a while
        receiver.send("expect")
        began = time.perf_counter()
        handle = pool.agent.make_prepped_xfer("WRITE", local, ours, remote, ours, b"done")
        state = pool.agent.transfer(handle)
        while state == "PROC":
            time.sleep(5e-5)
            state = pool.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        assert state == "DONE", state
        pool.agent.release_xfer_handle(handle)
        receiver.recv()
        pipe.send(seconds)
    receiver.send(None)


class Side:
    """A child process that answers what it is asked."""

    def __init__(self, target: object, *arguments: object):
        self._pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
        self.process.start()

    def ready(self) -> None:
        assert self._pipe.poll(DEADLINE_S), "a benchmark process did not start"
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self.process.join(10)
        self.process.kill()

    def ask(self, what: object) -> float:
        self._pipe.send(what)
        assert self._pipe.poll(DEADLINE_S), "a benchmark process did not answer"
        return float(self._pipe.recv())


def relayed(stub: generation_pb2_grpc.GenerationStub, prompt: Sequence[int], salt: str) -> tuple[float, pb.Timing]:
    """Seconds to the first token at the client, and the request's timing."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=types_pb2.Sampling(temperature=0.0),
        stopping=types_pb2.Stopping(max_new_tokens=NEW_TOKENS, ignore_eos=True),
        cache_salt=salt,
    )
    began = time.perf_counter()
    first = 0.0
    for message in stub.Generate(request, timeout=DEADLINE_S):
        if not first and message.HasField("delta"):
            first = time.perf_counter() - began
    return first, message.finished.timing


def whole(stub: generation_pb2_grpc.GenerationStub, prompt: Sequence[int], salt: str) -> tuple[float, pb.Timing]:
    """Seconds to the end of the answer, and the request's timing."""
    began = time.perf_counter()
    _, timing = relayed(stub, prompt, salt)
    return time.perf_counter() - began, timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048", help="prompt lengths in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--kv-memory", default="512MiB")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]

    flags = {"model": arguments.model, "kv_memory": arguments.kv_memory, "chunk_size": str(arguments.chunk_size)}
    nodes = {Role.PREFILL: 1, Role.DECODE: 1}
    flags["threads"] = "1"
    plan, checked_plan = (
        plan_cluster(nodes, claim_addresses("127.0.0.1:0"), flags | {"kv_checksum": checksum}, os.environ)
        for checksum in (False, True)
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        Interrupts() as interrupts,
        Cluster(plan, interrupts, quiet=True) as cluster,
        Cluster(checked_plan, interrupts, quiet=True) as checked_cluster,
    ):
        cluster.start(timeout=DEADLINE_S)
        checked_cluster.start(timeout=DEADLINE_S)
        stub, checked = (
            generation_pb2_grpc.GenerationStub(grpc.insecure_channel(one.addresses[0])) for one in (plan, checked_plan)
        )
        _, timing = relayed(stub, random.choices(VOCABULARY, k=32), "first")
        page_bytes = timing.relayed_bytes // 2  # 32 tokens are two pages
        pages = plan.node.kv_memory // page_bytes  # pools of one size: what lies in a processor's cache counts

        single = Side(bare, plan.node, arguments.chunk_size)
        single.ready()
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        context = multiprocessing.get_context("spawn")
        receiver = context.Process(target=plain_receiver, args=(theirs, pages, page_bytes), daemon=True)
        receiver.start()
        plain = Side(plain_sender, ours, pages, page_bytes)
        plain.ready()

        print(f"{arguments.model}, {os.cpu_count()} cores, chunks of {arguments.chunk_size}, {arguments.rounds} rounds")
        print(
            f"{'tokens':>7} {'bare s':>8} {'relay s':>8} {'ttft ratio':>10} {'hand-off ms':>11} {'of prefill':>10}",
            end="",
        )
        print(f" {'plain GB/s':>10} {'computed GB/s':>13} {'ratio':>5} {'cached GB/s':>11} {'ratio':>5}", end="")
        print(f" {'checked GB/s':>12} {'ratio':>5} {'time':>5}")
        for length in lengths:
            sides = (stub, checked, single, plain)
            report(length, measure(*sides, length, arguments.rounds, plan.node.page_size, page_bytes))
        single.close()
        plain.close()
        receiver.join(10)
        receiver.kill()


def measure(
    stub: generation_pb2_grpc.GenerationStub,
    checked: generation_pb2_grpc.GenerationStub,
    single: Side,
    plain: Side,
    length: int,
    rounds: int,
    page_size: int,
    page_bytes: int,
) -> dict[str, list[float]]:
    """One figure a round of each kind. A first round, not kept, warms all of them up."""
    names = ("bare", "ttft", "handoff", "prefill", "relay", "cached", "cached s", "checked", "checked s", "plain")
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        prompt = random.choices(VOCABULARY, k=length)
        count = -(-length // page_size)
        bare_s = single.ask(prompt)
        ttft, timing = relayed(stub, prompt, f"round {number} of {length}")
        relayed(checked, prompt, f"round {number} of {length}")
        cached_s, again = whole(stub, prompt, f"round {number} of {length}")
        checked_s, verified = whole(checked, prompt, f"round {number} of {length}")
        plain_s = plain.ask(count)
        if number:
            figures["bare"].append(bare_s)
            figures["ttft"].append(ttft)
            figures["handoff"].append(timing.handoff)
            figures["prefill"].append(timing.prefill)
            figures["relay"].append(timing.relayed_bytes / timing.relay / 1e9)
            figures["cached"].append(again.relayed_bytes / again.relay / 1e9)
            figures["cached s"].append(cached_s)
            figures["checked"].append(verified.relayed_bytes / verified.relay / 1e9)
            figures["checked s"].append(checked_s)
            figures["plain"].append(count * page_bytes / plain_s / 1e9)
    return figures


def report(length: int, figures: dict[str, list[float]]) -> None:
    def middle(top: str, bottom: str) -> float:
        return statistics.median(a / b for a, b in zip(figures[top], figures[bottom], strict=True))

    typical = {name: statistics.median(values) for name, values in figures.items()}
    print(f"{length:>7} {typical['bare']:>8.3f} {typical['ttft']:>8.3f} {middle('ttft', 'bare'):>10.3f}", end="")
    print(f" {typical['handoff'] * 1e3:>11.1f} {middle('handoff', 'prefill'):>10.1%} {typical['plain']:>10.2f}", end="")
    print(f" {typical['relay']:>13.2f} {middle('relay', 'plain'):>5.2f}", end="")
    print(f" {typical['cached']:>11.2f} {middle('cached', 'plain'):>5.2f}", end="")
    print(f" {typical['checked']:>12.2f} {middle('checked', 'cached'):>5.2f}", end="")
    print(f" {middle('checked s', 'cached s'):>5.2f}", flush=True)


if __name__ == "__main__":
    main()
