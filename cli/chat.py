"""`kvrelay chat`: one question, or a conversation that remembers what was said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from cli.client import Client
from cli.generate import add_request_arguments, answer_watched, fill_request, read_prompt, show_text
from cli.show import describe_error, say, timing_table
from engine.core.errors import KVRelayError
from kvrelay.v1 import generation_pb2 as pb

__all__ = ["chat"]

_HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay chat`."""
    parser.add_argument("message", nargs="?", help="ask this and leave; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="how the model shall behave")
    add_request_arguments(parser)
    parser.set_defaults(run=_run)


class _Conversation:
    """The messages so far. A question that got no answer at all is forgotten, a cut answer is kept as it was shown."""

    def __init__(self, client: Client, flags: argparse.Namespace):
        self._client = client
        self._flags = flags
        self._messages: list[pb.ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        system = self._flags.system
        self._messages = [pb.ChatMessage(role="system", content=system)] if system is not None else []

    def ask(self, question: str) -> None:
        """Stream the answer to `question`. Raises KVRelayError or KeyboardInterrupt after tidying up."""
        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            show_text(text)

        asked = pb.ChatMessage(role="user", content=question)
        request = pb.GenerateRequest(chat=pb.Chat(messages=[*self._messages, asked]))
        fill_request(self._flags, request)
        try:
            answer = answer_watched(self._client, request, show, self._flags.deadline)
        finally:
            if shown:
                print(flush=True)
                self._messages += [asked, pb.ChatMessage(role="assistant", content="".join(shown))]
        if self._flags.timing:
            say(timing_table([("", answer.finished)]))


def _run(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    with Client.from_flags(flags, env) as client:
        conversation = _Conversation(client, flags)
        if flags.message is not None:
            conversation.ask(read_prompt(flags.message))
        else:
            _converse(conversation, client)
    return 0


def _converse(conversation: _Conversation, client: Client) -> None:
    """Read questions and commands until the input ends."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives input() line editing and history

        model = client.model()
        say(f"{model.name}, {model.max_context} tokens of context. {_HELP}.")
        prompt = "> "
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say(f"\n{_HELP}")
            continue
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            say(_HELP)
        elif line:
            _answer(conversation, line)


def _answer(conversation: _Conversation, question: str) -> None:
    try:
        conversation.ask(question)
    except KeyboardInterrupt:
        say("(stopped)")
    except KVRelayError as error:
        say(f"kvrelay: {describe_error(error)}")
