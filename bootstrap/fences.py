"""Rooms whose pages a decode node keeps until their writer has said that it writes no more.

    attempt closed, or RoomFenced from the decode node ─► Abort to the writer ─► RoomQuiesced ─► WriterQuiesced
                                                               └─ again while no answer comes

Only what is between two attached nodes is kept here. When either leaves, a word may be lost; a decode node names what
it still has fenced when it attaches, and to a writer that joins, and so everything begins anew. That a writer has died
is none of our business: decode nodes learn it from their transfer layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from bootstrap.registry import Node, Registry
from engine.core.clock import Clock
from engine.core.messages import Abort, WriterQuiesced
from engine.core.types import NodeIdentity, RoomKey

__all__ = ["REMIND_S", "Fences"]

REMIND_S = 5.0  # a writer that has not answered for so long is asked again
MAX_WAITS = 100_000  # beyond that a room is left to its decode node, which names it every few seconds


@dataclass(slots=True)
class _Wait:
    writer: Node
    decode: Node | None  # that it may be writing to; None: it never learned where to write
    asked: float


class Fences:
    def __init__(self, registry: Registry, clock: Clock):
        self._registry = registry
        self._clock = clock
        self._waits: dict[RoomKey, _Wait] = {}

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._waits

    def add(self, key: RoomKey, writer: Node, decode: Node | None) -> None:
        """The attempt has ended, and the writer was told. decode: None when it never learned where to write."""
        if len(self._waits) < MAX_WAITS:
            self._waits[key] = _Wait(writer, decode, self._clock())

    def reported(self, key: RoomKey, identity: NodeIdentity, decode: Node) -> None:
        """A decode node waits for a writer: ask that one, if it is here. If not, it is named again when it joins."""
        writer = self._registry.get(identity.node_id)
        if writer is not None and writer.identity == identity:
            self.add(key, writer, decode)
            writer.link.send(Abort(key, f"its pages are fenced on {decode.node_id}"))

    def quiesced(self, key: RoomKey, writer: Node) -> None:
        """Pass it on, however long ago the attempt ended."""
        if key in self._waits and self._waits[key].writer is writer:
            decode = self._waits.pop(key).decode
            if decode is not None:
                decode.link.send(WriterQuiesced(key))

    def remind(self) -> None:
        """Ask again where no answer has come. To be called every fraction of a second."""
        now = self._clock()
        for key, wait in self._waits.items():
            if now - wait.asked >= REMIND_S:
                wait.asked = now
                wait.writer.link.send(Abort(key, "it has ended, and no answer has come"))

    def node_left(self, node: Node) -> None:
        self._waits = {key: wait for key, wait in self._waits.items() if node not in (wait.writer, wait.decode)}

    def check_integrity(self) -> None:
        for wait in self._waits.values():
            for node in (wait.writer, wait.decode):
                assert node is None or self._registry.get(node.node_id) is node
