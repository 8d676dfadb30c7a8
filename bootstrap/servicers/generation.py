"""What clients call."""

# ruff: noqa: N802  (the .proto names the methods)

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bootstrap import wire
from bootstrap.answer import Answer, AnswerOptions
from bootstrap.config import BootstrapConfig
from bootstrap.front import FrontDoor
from bootstrap.limits import ClientLimits
from bootstrap.prompts import Prompts
from bootstrap.requests import Ask, LiveRequest
from bootstrap.text import TextModel, check_prompt_tokens
from engine.core.clock import Clock
from engine.core.errors import DeadlineExceeded, InvalidField, NotFound
from engine.core.model_store import PreparedModel
from engine.core.sampling import FinishReason
from engine.core.types import Role
from kvrelay.v1 import generation_pb2 as pb
from kvrelay.v1 import generation_pb2_grpc as pb_grpc
from rpc.security import Guard, caller_name

__all__ = ["GenerationServicer"]

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(pb_grpc.GenerationServicer):
    """kvrelay.v1.Generation."""

    def __init__(
        self,
        config: BootstrapConfig,
        model: PreparedModel,
        text: TextModel,
        front: FrontDoor,
        clock: Clock,
        guard: Guard,
        limits: ClientLimits,
    ):
        self._config = config
        self._model = model
        self._text = text
        # A chat model's own end of turn often stands in the tokenizer's configuration only.
        self._end_ids = tuple(sorted({*model.eos_token_ids, *text.end_ids}))
        self._prompts = Prompts(text, model.vocab_size)
        self._front = front
        self._clock = clock
        self._guard = guard
        self._limits = limits

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        key = self._guard.key(context)
        with self._front.counting_refusals():
            end = self._limits.begin(caller_name(key, context))
        context.add_done_callback(lambda _: end())  # type: ignore[arg-type]  # as below
        try:
            with self._front.counting_refusals():
                ask, options = await self._read(request, context.time_remaining(), key.name if key else None)
                answer = Answer(self._text, options, ask.token_ids)
                finish = await self._prompts.resume(answer, ask.resumed, ask.stopping)
                news = asyncio.Event()
                live = self._front.submit(ask, news.set, finish)
            # Runs however the call ends: answered, cancelled, past its deadline, or with its connection.
            context.add_done_callback(lambda _: self._front.client_gone(live))  # type: ignore[arg-type]
            async for response in self._answer(live, answer, news):
                if response.HasField("finished"):
                    end()
                yield response
        finally:
            end()  # before the client knows that the call has ended: its next one may follow at once

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        key = self._guard.key(context)
        name, admin = (key.name, key.admin) if key else (None, False)
        self._front.abort(request.request_id, name, of_others=admin)
        return pb.AbortResponse()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        layout = self._front.registry.layout
        return pb.GetModelResponse(
            name=self._model.name,
            fingerprint=self._model.fingerprint,
            architecture=self._model.architecture,
            vocab_size=self._model.vocab_size,
            max_context=self._max_context(),
            page_size=layout.page_size if layout else 0,
            chat_template=self._text.has_chat,
            eos_token_ids=self._end_ids,
        )

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.GetClusterResponse:
        registry = self._front.registry
        return pb.GetClusterResponse(
            prefill_nodes=len(registry.serving(Role.PREFILL)),
            decode_nodes=len(registry.serving(Role.DECODE)),
            unified_nodes=len(registry.serving(Role.UNIFIED)),
            live_requests=len(self._front.requests),
            queued_requests=len(self._front.attempts.queue),
            serving=self._front.ready,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        self._limits.take(caller_name(self._guard.key(context), context))
        match request.WhichOneof("prompt"):
            case "text":
                text, token_ids = request.text, await self._prompts.encode(request.text, self._max_context())
            case "chat":
                messages = wire.chat_from_wire(request.chat)
                text, token_ids = await self._prompts.encode_chat(messages, self._max_context())
            case _:
                raise InvalidField("prompt", None, "text or chat")
        return pb.TokenizeResponse(token_ids=token_ids, text=text)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        self._limits.take(caller_name(self._guard.key(context), context))
        text = await self._prompts.decode(request.token_ids, request.skip_special_tokens, self._max_context())
        return pb.DetokenizeResponse(text=text)

    def close(self) -> None:
        """Begin no more text work. May be called twice."""
        self._prompts.close()

    # ---- the request ----

    async def _read(
        self, message: pb.GenerateRequest, seconds_left: float | None, client: str | None
    ) -> tuple[Ask, AnswerOptions]:
        """Check everything that can be checked before the request is queued. Raises InvalidField, NotFound."""
        arrived = self._clock()
        if seconds_left is not None and seconds_left <= 0:
            raise DeadlineExceeded("the deadline passed before the request arrived", phase="queued")
        wire.check_lengths(message)
        if message.model not in ("", self._model.name):
            raise NotFound(
                f"model {message.model!r} is not served here; {self._model.name!r} is",
                reason="MODEL_NOT_FOUND",
                model=message.model,
                served=self._model.name,
            )
        if message.fingerprint not in ("", self._model.fingerprint):
            raise NotFound(
                f"the model served here has the same name and another fingerprint, {self._model.fingerprint}",
                reason="OTHER_FINGERPRINT",
                served=self._model.fingerprint,
            )
        sampling = wire.sampling_from_wire(message.sampling)
        options = wire.options_from_wire(message)
        ttft_target = wire.ttft_target_from_wire(message)
        token_ids = await self._prompt(message)
        # Again, as a node that attached meanwhile may have made the context smaller.
        check_prompt_tokens(len(token_ids), self._max_context() - 1)
        room = self._max_context() - len(token_ids)
        fits = self._front.registry.answer_room(len(token_ids))
        usual = self._config.default_max_new_tokens
        stopping = wire.stopping_from_wire(
            message.stopping,
            # An answer that was begun elsewhere may be longer than ours would be.
            default=max(len(message.resumed_token_ids), usual if fits is None else max(1, min(usual, fits))),
            room=room,
            eos_token_ids=self._end_ids,
            vocab_size=self._model.vocab_size,
        )
        ask = Ask(
            request_id=message.request_id or secrets.token_hex(8),
            token_ids=token_ids,
            sampling=sampling,
            stopping=stopping,
            priority=message.priority if message.HasField("priority") else None,
            routing_key=message.routing_key,
            cache_salt=message.cache_salt,
            ttft_target=ttft_target,
            deadline=None if seconds_left is None else arrived + seconds_left,
            resumed=wire.resumed_from_wire(message, stopping.max_new_tokens, self._model.vocab_size),
            client=client,
        )
        return ask, options

    async def _prompt(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        """Token ids of the prompt, at least one. Raises InvalidField."""
        kind, context = message.WhichOneof("prompt"), self._max_context()
        match kind:
            case "text":
                token_ids = await self._prompts.encode(message.text, context) if message.text else ()
            case "token_ids":
                check_prompt_tokens(len(message.token_ids.ids), context - 1)
                token_ids = tuple(message.token_ids.ids)
            case "chat":
                _, token_ids = await self._prompts.encode_chat(wire.chat_from_wire(message.chat), context)
            case _:
                raise InvalidField("prompt", None, "text, token_ids or chat")
        if not token_ids:
            raise InvalidField(kind, "", "a prompt of at least one token")
        # Of text and chat too: a tokenizer may know tokens that the model does not.
        wire.check_token_ids(kind, token_ids, self._model.vocab_size)
        return token_ids

    def _max_context(self) -> int:
        nodes = self._front.registry.max_context
        return self._model.max_context if nodes is None else min(nodes, self._model.max_context)

    # ---- the answer ----

    async def _answer(
        self, live: LiveRequest, answer: Answer, news: asyncio.Event
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Whatever is ready when the stream takes more goes out as one delta. Raises the error the request ended by."""
        started = False
        while True:
            ended = live.ended
            tokens = live.take()
            if not started and (live.cached_tokens is not None or tokens or live.finish):
                started = True
                yield wire.started_to_wire(live, self._model.fingerprint)
            if tokens:
                piece = wire.piece_to_wire(answer.extend(tokens))
                if piece is not None:
                    yield piece
            if answer.matched_stop is not None:
                self._front.stop(live, FinishReason.STOP, "stop string")
                break
            if ended:
                break
            await news.wait()
            news.clear()
        if live.error is not None and answer.matched_stop is None:
            raise live.error
        yield wire.finished_to_wire(live, answer, answer.finish())
