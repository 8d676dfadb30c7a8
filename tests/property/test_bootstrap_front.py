"""The front door under any sequence of events: no request is lost, none repeats a token, no page stays fenced."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bootstrap.config import BootstrapConfig
from bootstrap.registry import Node
from bootstrap.requests import LiveRequest
from engine.core.errors import Unavailable
from engine.core.messages import Abort, Granted, PeerLeft, Reserve, RoomFailed, RoomQuiesced, Submit, WriterQuiesced
from engine.core.sampling import FinishReason
from engine.core.types import NodeIdentity, Role, RoomKey
from tests.helpers.front_door import House, ask, token

LENGTH = 5  # tokens of every answer


@dataclass
class Player:
    """A node as its commands make it. Prefill: rooms it may write. Decode: rooms whose pages it keeps."""

    node: Node
    read: int = 0  # commands taken in
    first_index: dict[RoomKey, int] = field(default_factory=dict)  # submitted, or reserved
    writable: set[RoomKey] = field(default_factory=set)  # prefill: granted, and not quiesced
    writers: dict[RoomKey, NodeIdentity] = field(default_factory=dict)  # decode
    made: dict[RoomKey, int] = field(default_factory=dict)  # decode: granted; next index
    quiet: set[RoomKey] = field(default_factory=set)  # decode: the writer is done
    fenced: set[RoomKey] = field(default_factory=set)  # decode: ended, the writer may still write


class FrontDoorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = House(BootstrapConfig(max_attempts=3, heartbeat_seconds=1.0))
        self.players: dict[NodeIdentity, Player] = {}
        self.requests: dict[LiveRequest, list[int]] = {}
        self.counter = 0

    # ---- events ----

    @rule(role=st.sampled_from(Role), number=st.integers(1, 2))
    def join(self, role: Role, number: int) -> None:
        self.counter += 1
        old = self.house.front.registry.get(f"{role}-{number}")
        if old is not None:
            self.players.pop(old.identity)
        node = self.house.join(role, f"{role}-{number}", incarnation=str(self.counter))
        self.players[node.identity] = Player(node)

    @precondition(lambda self: self.players)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        player = self.players.pop(data.draw(st.sampled_from(sorted(self.players, key=str))))
        self.house.front.leave(player.node, "gone")

    @rule(priority=st.none() | st.integers(-1, 1))
    def submit(self, priority: int | None) -> None:
        self.counter += 1
        with contextlib.suppress(Unavailable):
            request = self.house.submit(ask(f"r{self.counter}", max_new_tokens=LENGTH, priority=priority))
            self.requests[request] = []

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        choices = [(p, key) for p in self._of(Role.DECODE) for key in p.first_index if key not in p.made]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            player.made[key] = player.first_index[key] + 1
            self.house.grant(player.node, key)

    @rule(data=st.data())
    def prefill_token(self, data: st.DataObject) -> None:
        choices = [(p, key) for p in self._of(Role.PREFILL) for key in p.first_index if key in p.writable]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            index = player.first_index.pop(key)
            self.house.output(player.node, token(key, index, FinishReason.LENGTH if index == LENGTH - 1 else None))

    @rule(data=st.data())
    def decode_token(self, data: st.DataObject) -> None:
        choices = [(p, key) for p in self._of(Role.DECODE) for key, index in p.made.items() if index < LENGTH]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            index = player.made[key]
            player.made[key] += 1
            last = index == LENGTH - 1
            if last:
                _drop(player, key)
            self.house.output(player.node, token(key, index, FinishReason.LENGTH if last else None))

    @rule(data=st.data(), retracted=st.booleans())
    def room_failed(self, data: st.DataObject, retracted: bool) -> None:
        choices = [(p, key) for p in self.players.values() for key in p.first_index]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            reason = "retracted" if retracted else "broken"
            self.house.front.on_report(player.node, RoomFailed(key, "transferring", reason))

    @rule(data=st.data())
    def quiesced(self, data: st.DataObject) -> None:
        choices = [(p, key) for p in self._of(Role.PREFILL) for key in sorted(p.writable, key=str)]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            player.writable.discard(key)
            self.house.front.on_report(player.node, RoomQuiesced(key))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.requests)))
        self.house.front.stop(request, FinishReason.ABORT, "gone")

    @rule(seconds=st.sampled_from([0.1, 0.6, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.house.clock.advance(seconds)
        for player in self.players.values():
            player.node.heard = self.house.clock()
        self.house.front.tick()

    # ---- what must hold ----

    @invariant()
    def books_are_right_and_tokens_come_once_and_in_order(self) -> None:
        self.house.check()
        for player in tuple(self.players.values()):
            self._read_commands(player)
        for request, indices in tuple(self.requests.items()):
            indices += [ready.index for ready in request.take()]
            assert indices == list(range(len(indices)))
            if request.ended:
                assert request.finish is not FinishReason.LENGTH or len(indices) == LENGTH
                del self.requests[request]

    def teardown(self) -> None:
        """Clients give up and writers fall silent: no page is fenced. Nodes leave: nothing is remembered of them."""
        front = self.house.front
        for request in self.requests:
            front.stop(request, FinishReason.ABORT, "gone")
        for player in self._of(Role.PREFILL):
            self._read_commands(player)
            for key in player.writable:
                front.on_report(player.node, RoomQuiesced(key))
            player.writable.clear()
        for player in self._of(Role.DECODE):
            self._read_commands(player)
            assert not player.fenced
            assert not player.made, "a room nobody ended"
        for player in self.players.values():
            front.leave(player.node, "gone")
        assert not front.requests
        self.house.check()

    # ---- the nodes' part ----

    def _of(self, role: Role) -> list[Player]:
        return [player for player in self.players.values() if player.node.role is role]

    def _read_commands(self, player: Player) -> None:
        sent = self.house.links[player.node].sent
        for command in sent[player.read :]:
            match command:
                case Submit(task):
                    player.first_index[task.key] = task.first_index
                case Granted(key):
                    player.writable.add(key)
                case Reserve(reservation):
                    player.first_index[reservation.key] = reservation.first_index
                    player.writers[reservation.key] = reservation.writer
                case Abort(key):
                    if key in player.first_index and key in player.writers and key not in player.quiet:
                        player.fenced.add(key)
                    player.first_index.pop(key, None)
                    player.made.pop(key, None)
                case WriterQuiesced(key):
                    player.quiet.add(key)
                    player.fenced.discard(key)
                case PeerLeft(identity):
                    player.fenced -= {key for key in player.fenced if player.writers[key] == identity}
        player.read = len(sent)
        if player.node.role is Role.DECODE:
            for key in player.fenced:
                writer = self.players.get(player.writers[key])
                assert writer is not None, "a page is fenced for a writer that is gone"
                self._read_commands(writer)
                assert key in writer.writable, "a page is fenced for a writer that will say no more"


def _drop(player: Player, key: RoomKey) -> None:
    player.made.pop(key)
    player.first_index.pop(key)


FrontDoorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFrontDoor = FrontDoorMachine.TestCase
