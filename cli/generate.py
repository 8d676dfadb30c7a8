"""`kvrelay generate`, and what it shares with chat: the flags and fields of a request."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cli.client import Answer, Client, ClientConfig, finish_reason
from cli.show import Waiting, say, timing_table
from engine.core.config import add_arguments
from kvrelay.v1 import generation_pb2 as pb
from kvrelay.v1 import types_pb2

__all__ = ["add_request_arguments", "answer_watched", "fill_request", "generate", "read_prompt", "show_text"]


def _whole(low: int, high: int) -> Callable[[str], int]:
    """Parser of a flag whose protobuf field holds whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not within {low} to {high}")
        return value

    return parse


def _seconds(text: str) -> float:
    """Parser of a time from now."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


_UINT32, _UINT64, _SINT32 = _whole(0, 2**32 - 1), _whole(0, 2**64 - 1), _whole(-(2**31), 2**31 - 1)

# Flags that are fields of Sampling and Stopping, by the field's name. The server knows the limits.
_SAMPLING: tuple[tuple[str, Callable[[str], float], str], ...] = (
    ("temperature", float, "0 is greedy (server's default: 1)"),
    ("top_p", float, "keep the most likely tokens of this total probability"),
    ("top_k", _UINT32, "keep this many of the most likely tokens"),
    ("min_p", float, "keep tokens at least this likely, relative to the likeliest"),
    ("repetition_penalty", float, "above 1: repeat prompt and answer less"),
    ("presence_penalty", float, "above 0: use a token again less"),
    ("frequency_penalty", float, "above 0: use a token again less, the more often it was used"),
    ("seed", _UINT64, "same seed, same answer"),
)
_STOPPING: tuple[tuple[str, Callable[[str], float], str], ...] = (
    ("max_new_tokens", _UINT32, "tokens to make at most"),
    ("min_new_tokens", _UINT32, "tokens to make before the answer may end"),
)


def generate(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay generate`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; - reads it from standard input")
    source.add_argument("--token-ids", type=_ids, metavar="ID,...", help="prompt as token ids")
    add_request_arguments(parser)
    parser.add_argument("--logprobs", action="store_true", help="with --json: log probabilities of the tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object with text, ids, usage and timing")
    parser.set_defaults(run=_run)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of everything a request may say beside its prompt. What is not given is left to the server."""
    for title, flags in (("Sampling", _SAMPLING), ("Stopping", _STOPPING)):
        group = parser.add_argument_group(title)
        for name, kind, text in flags:
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be repeated")
    group.add_argument("--stop-token-ids", type=_ids, default=[], metavar="ID,...", help="end at these tokens")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end-of-sequence token")
    group = parser.add_argument_group("Request")
    group.add_argument("--model", default="", help="refuse to be served by any other")
    group.add_argument("--request-id", default="", metavar="ID", help="name of this request, for logs and Abort")
    group.add_argument("--priority", type=_SINT32, metavar="N", help="larger runs first")
    group.add_argument("--routing-key", default="", metavar="KEY", help="requests of one key share a prefill node")
    group.add_argument("--cache-salt", default="", metavar="SALT", help="share cached prefixes only under this salt")
    group.add_argument(
        "--ttft-target", type=float, metavar="SECONDS", help="first token wanted within so long (policy slack)"
    )
    group.add_argument("--deadline", type=_seconds, metavar="SECONDS", help="give up after so long")
    group.add_argument("--timing", action="store_true", help="print where the time went (to stderr)")
    add_arguments(parser, ClientConfig)


def fill_request(flags: argparse.Namespace, request: pb.GenerateRequest) -> pb.GenerateRequest:
    """`request` with the fields of `add_request_arguments`."""
    for message, names in ((request.sampling, _SAMPLING), (request.stopping, _STOPPING)):
        for name, _, _ in names:
            if getattr(flags, name) is not None:
                setattr(message, name, getattr(flags, name))
    request.stopping.MergeFrom(
        types_pb2.Stopping(stop=flags.stop, stop_token_ids=flags.stop_token_ids, ignore_eos=flags.ignore_eos)
    )
    request.MergeFrom(
        pb.GenerateRequest(
            request_id=flags.request_id,
            model=flags.model,
            priority=flags.priority,
            routing_key=flags.routing_key,
            cache_salt=flags.cache_salt,
            ttft_target_seconds=flags.ttft_target,
        )
    )
    return request


def show_text(text: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def answer_watched(
    client: Client, request: pb.GenerateRequest, show: Callable[[str], None], deadline: float | None
) -> Answer:
    """`client.answer`, with a sign of life on the terminal until the first text comes."""
    if not sys.stderr.isatty():  # a log need not know that one waits
        return client.answer(request, show, deadline)
    with Waiting("waiting for the first token") as waiting:

        def first(text: str) -> None:
            waiting.done()
            show(text)

        return client.answer(request, first, deadline)


def read_prompt(argument: str) -> str:
    """The prompt, read from standard input when the argument is "-"."""
    return sys.stdin.read() if argument == "-" else argument


def _ids(text: str) -> list[int]:
    return [_UINT32(part) for part in text.replace(",", " ").split()]


def _run(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    request = pb.GenerateRequest(response=pb.ResponseOptions(logprobs=flags.logprobs))
    if flags.token_ids is not None:
        request.token_ids.ids.extend(flags.token_ids)
    else:
        request.text = read_prompt(flags.prompt)
    fill_request(flags, request)
    with Client.from_flags(flags, env) as client:
        shown = False

        def show(text: str) -> None:
            nonlocal shown
            shown = True
            show_text(text)

        try:
            answer = answer_watched(client, request, (lambda text: None) if flags.json else show, flags.deadline)
        finally:
            if shown:
                print(flush=True)  # also before an error's line, or after Ctrl-C
    if flags.json:
        print(json.dumps(_as_json(answer), ensure_ascii=False))
    if flags.timing:
        say(timing_table([("", answer.finished)]))
    return 0


def _as_json(answer: Answer) -> dict[str, Any]:
    finished = answer.finished
    matched = finished.WhichOneof("matched")
    return {
        "request_id": answer.started.request_id,
        "text": answer.text,
        "token_ids": answer.token_ids,
        **({"logprobs": answer.logprobs} if answer.logprobs else {}),
        "finish_reason": finish_reason(finished),
        "matched": getattr(finished, matched) if matched else None,
        "usage": _fields(finished.usage),
        "timing": _fields(finished.timing),
    }


def _fields(message: pb.Usage | pb.Timing) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
