"""Rooms whose pages a decode node keeps until their writer has said that it writes no more.

    attempt closed, or RoomFenced from the decode node ─► Abort to the writer ─► RoomQuiesced ─► WriterQuiesced

Only what is between two attached nodes is kept here. When either leaves, a word may be lost; a decode node names what
it still has fenced when it attaches, and to a writer that joins, and so everything begins anew. That a writer has died
is none of our business: decode nodes learn it from their transfer layer.
"""

from __future__ import annotations

from bootstrap.registry import Node, Registry
from engine.core.messages import Abort, WriterQuiesced
from engine.core.types import NodeIdentity, RoomKey

__all__ = ["Fences"]


class Fences:
    def __init__(self, registry: Registry):
        self._registry = registry
        self._pairs: dict[RoomKey, tuple[Node, Node]] = {}  # writer, and the node it may be writing to

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._pairs

    def add(self, key: RoomKey, writer: Node, decode: Node) -> None:
        """The attempt has ended, and the writer was told."""
        self._pairs[key] = (writer, decode)

    def reported(self, key: RoomKey, identity: NodeIdentity, decode: Node) -> None:
        """A decode node waits for a writer: ask that one, if it is here. If not, it is named again when it joins."""
        writer = self._registry.get(identity.node_id)
        if writer is not None and writer.identity == identity:
            self.add(key, writer, decode)
            writer.link.send(Abort(key, f"its pages are fenced on {decode.node_id}"))

    def quiesced(self, key: RoomKey, writer: Node) -> None:
        """Pass it on, however long ago the attempt ended."""
        if key in self._pairs and self._pairs[key][0] is writer:
            self._pairs.pop(key)[1].link.send(WriterQuiesced(key))

    def node_left(self, node: Node) -> None:
        self._pairs = {key: pair for key, pair in self._pairs.items() if node not in pair}

    def check_integrity(self) -> None:
        for pair in self._pairs.values():
            assert all(self._registry.get(node.node_id) is node for node in pair)
