"""`kvrelay demo`: the whole thing once, on this machine, with a real model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from cli.client import Answer, Client, finish_reason
from cli.cluster import Cluster, Interrupts
from cli.generate import answer_watched, show_text
from cli.plan import claim_addresses, plan_cluster
from cli.services import prepare_model
from cli.show import say, timing_table
from engine.core.errors import KVRelayError
from engine.core.model_store import DEMO_MODEL
from engine.core.sampling import FinishReason
from engine.core.types import Role
from kvrelay.v1 import generation_pb2 as pb

__all__ = ["demo"]

_START_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 300.0
_MAX_NEW_TOKENS = 80

_SYSTEM = """\
You are a patient teacher of physics and astronomy at a public observatory. Visitors of all ages come to you with
questions about the sky, and you enjoy every one of them, the simple ones most of all.

How you answer: begin with the answer itself, in one plain sentence. Then explain it in two or three more sentences,
with words a child of ten understands. Compare what cannot be seen with something from the kitchen, the garden or the
street. Use numbers only when they help, and round them. Never use formulas. When there are several
explanations, give the one that most astronomers hold to be right, and say so when it is not certain.

What you do not do: you do not talk about horoscopes, and when someone asks for one you explain kindly what astronomy
can tell about the stars instead. You do not make up observations, names of people or dates. When you do not know
something you say that you do not know it, and name a book or a person who might. You do not repeat the question, and
you do not praise it.

What visitors can see here: the Moon and the bright planets with the big telescope, the Sun with a special filter in
the afternoon, and on clear nights the Milky Way from the terrace with the naked eye. If a question is about something
that can be seen this way, end your answer with one sentence that says how.

Safety comes first. Nobody looks at the Sun without the filter, not even for a moment, and you remind every visitor of
that when the Sun is what they ask about. On the terrace it is dark and there are steps, so people walk slowly and
use the red lamps, which do not spoil the night vision of the others.

Keep your answers short and friendly.
"""
_QUESTIONS = ("How far away is the Sun?", "Which planet is the largest?")  # the demo model answers both in a sentence


def demo(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay demo`."""
    parser.add_argument("--model", default=DEMO_MODEL, help=f"what `kvrelay prepare` takes (default: {DEMO_MODEL})")
    parser.add_argument("--show-logs", action="store_true", help="show the log lines of the processes")
    parser.set_defaults(run=_run)


def _run(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    options = {"model": flags.model, "kv_memory": "512MiB"}
    plan = plan_cluster({Role.PREFILL: 1, Role.DECODE: 1}, claim_addresses("127.0.0.1:0"), options, env)
    with Interrupts() as interrupts, Cluster(plan, interrupts, quiet=not flags.show_logs) as cluster:
        say(f"KVRelay demo: one prefill node, one decode node, {flags.model}")
        prepare_model(plan.node.model, plan.node.model_dir)
        cluster.start(_START_TIMEOUT_S)
        with Client(plan.addresses[0], plan.access) as client:
            say(f"\nA system prompt (how to answer visitors of an observatory), and: {_QUESTIONS[0]}\n")
            first = _ask(client, _QUESTIONS[0])
            say(f"\nThe same system prompt, and: {_QUESTIONS[1]}\n")
            second = _ask(client, _QUESTIONS[1])
            say(f"\n{timing_table([('first', first.finished), ('second', second.finished)])}\n")
        _check(first, second)
    if not cluster.orderly:
        raise KVRelayError("the answers came, but not every process stopped in order")
    usage = second.finished.usage
    say(f"done: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens of the second question were cached")
    return 0


def _ask(client: Client, question: str) -> Answer:
    request = pb.GenerateRequest()
    request.chat.messages.add(role="system", content=_SYSTEM)
    request.chat.messages.add(role="user", content=question)
    request.sampling.temperature = 0
    request.stopping.max_new_tokens = _MAX_NEW_TOKENS
    answer = answer_watched(client, request, show_text, _ANSWER_TIMEOUT_S)
    print(flush=True)
    if finish_reason(answer.finished) == FinishReason.LENGTH:
        say(f"(cut at {_MAX_NEW_TOKENS} tokens)")
    return answer


def _check(first: Answer, second: Answer) -> None:
    """The demo is also the first thing that tells a user whether the installation works."""
    for answer in (first, second):
        if not answer.text.strip():
            raise KVRelayError("the model answered nothing")
        if answer.finished.timing.relayed_bytes == 0:
            raise KVRelayError("no KV pages were relayed")
    if second.finished.usage.cached_tokens == 0:
        raise KVRelayError("the second question did not find the system prompt in the prefix cache")
