"""Chat messages to prompt text, by the template a model brings along."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.core.errors import InvalidField

__all__ = ["ChatMessage", "ChatTemplate"]


MAX_REASON = 200  # characters; the reason may quote the messages, and goes into a status


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the assistant said. Here it only stands for its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. Raises jinja2.TemplateError when it cannot be compiled.

    Templates come with models, so they run sandboxed; what they may use beyond plain Jinja (raise_exception,
    strftime_now, tojson, break and continue, generation blocks, tools and documents, which are none here, bos_token
    and eos_token) is what published templates rely on.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Prompt text that ends where the assistant's answer starts. InvalidField when the template refuses."""
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # a template is a program of the model's: whatever it raises, it refuses
            roles = [message.role for message in messages]
            limit = f"what the model's chat template takes: {str(error)[:MAX_REASON]}"
            raise InvalidField("chat.messages", roles, limit) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as templates expect


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)
