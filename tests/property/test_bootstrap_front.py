"""The front door under any sequence of events: no request is lost, none repeats a token, no page stays fenced.

And two nodes that are set aside are given nothing together while there is another way.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bootstrap.config import BootstrapConfig
from bootstrap.pairs import FAILURES
from bootstrap.registry import Node
from bootstrap.requests import Attempt, LiveRequest
from engine.core.errors import InvalidField, Unavailable
from engine.core.messages import (
    Abort,
    AdmitReport,
    Command,
    Granted,
    PeerJoined,
    Reserve,
    RoomFailed,
    RoomFenced,
    RoomQuiesced,
    Submit,
    WriterQuiesced,
)
from engine.core.sampling import FinishReason
from engine.core.types import NodeIdentity, Role, RoomKey
from tests.helpers.front_door import House, ask, token

LENGTH = 5  # tokens of every answer


@dataclass(repr=False)
class Player:
    """A process as its commands make it, attached or not. Commands that came over a session that ended are lost."""

    identity: NodeIdentity
    role: Role
    node: Node | None = None  # None: between two sessions
    read: int = 0  # commands taken in, of this session
    first_index: dict[RoomKey, int] = field(default_factory=dict)  # submitted, or reserved; not over
    writing: dict[RoomKey, None] = field(default_factory=dict)  # prefill: granted, and writes may be in progress
    to_answer: set[RoomKey] = field(default_factory=set)  # prefill: aborted, to be answered when quiet
    writers: dict[RoomKey, NodeIdentity] = field(default_factory=dict)  # decode
    made: dict[RoomKey, int] = field(default_factory=dict)  # decode: granted, unified: admitted; next index
    quiet: set[RoomKey] = field(default_factory=set)  # decode: the writer is done
    fenced: set[RoomKey] = field(default_factory=set)  # decode: ended, the writer may still write

    def __repr__(self) -> str:
        return str(self.identity)

    def end(self, key: RoomKey) -> None:
        """An attempt is over. On a decode node, pages that were granted and may still be written to are fenced."""
        if self.role is Role.DECODE and key in self.made and key not in self.quiet:
            self.fenced.add(key)
        self.first_index.pop(key, None)
        self.made.pop(key, None)


class FrontDoorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = House(BootstrapConfig(max_attempts=3, heartbeat_seconds=1.0))
        self.players: dict[NodeIdentity, Player] = {}
        self.requests: dict[LiveRequest, list[int]] = {}
        self.counter = 0
        self.roles: tuple[Role, ...] = ()

    # ---- events ----

    @initialize(
        roles=st.sampled_from([Role.PREFILL.pools, Role.UNIFIED.pools]), requests=st.integers(0, 3), data=st.data()
    )
    def begin(self, roles: tuple[Role, ...], requests: int, data: st.DataObject) -> None:
        """Something to break."""
        self.roles = roles
        self._watch_reservations()
        for role in roles:
            for number in (1, 2):
                self.join(role, number, 100)
        for _ in range(requests):
            self.submit(None)
        for player in tuple(self.players.values()):
            self._read_commands(player)
        for _ in range(requests):
            self.grant(data)

    def join(self, role: Role, number: int, pages: int) -> None:
        """A new process, which takes the place of one with that name."""
        self.counter += 1
        identity = NodeIdentity(f"{role}-{number}", str(self.counter))
        for old in [player for player in self.players if player.node_id == identity.node_id]:
            del self.players[old]
        self.players[identity] = player = Player(identity, role)
        self._attach(player, pages)

    @precondition(lambda self: len(self.players) < 2 * len(self.roles))
    @rule(data=st.data(), pages=st.sampled_from([4, 100]))
    def start_process(self, data: st.DataObject, pages: int) -> None:
        names = {player.node_id for player in self.players}
        free = [(role, number) for role in self.roles for number in (1, 2) if f"{role}-{number}" not in names]
        self.join(*data.draw(st.sampled_from(free)), pages)

    @precondition(lambda self: self.players)
    @rule(data=st.data(), fate=st.sampled_from(["session ends", "session ends", "dies", "is replaced"]))
    def leave(self, data: st.DataObject, fate: str) -> None:
        player = self.players[data.draw(st.sampled_from(sorted(self.players, key=str)))]
        if fate == "is replaced":
            self.join(player.role, int(player.identity.node_id[-1]), 100)
            return
        if fate == "dies":
            del self.players[player.identity]
        if player.node is not None:
            self.house.front.leave(player.node, fate)
            player.node = None
            for key in tuple(player.first_index):
                player.end(key)
            player.to_answer.clear()  # of rooms that it still writes to, nobody hears when it is quiet

    @precondition(lambda self: any(player.node is None for player in self.players.values()))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self._attach(data.draw(st.sampled_from([player for player in self.players.values() if player.node is None])))

    @rule(priority=st.none() | st.integers(-1, 1), resumed=st.sampled_from([0, 0, 0, 2, LENGTH - 1]))
    def submit(self, priority: int | None, resumed: int = 0) -> None:
        """resumed: tokens of its answer that another front door has delivered."""
        self.counter += 1
        asked = ask(f"r{self.counter}", max_new_tokens=LENGTH, priority=priority)
        with contextlib.suppress(Unavailable, InvalidField):
            request = self.house.submit(replace(asked, resumed=tuple(range(1000, 1000 + resumed))))
            self.requests[request] = list(range(resumed))

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        choices = [(p, key) for p in self._of(Role.DECODE) for key in p.first_index if key not in p.made]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            player.made[key] = player.first_index[key] + 1
            self.house.grant(_node(player), key)

    @rule(data=st.data())
    def prefill_token(self, data: st.DataObject) -> None:
        choices = [(p, key) for p in self._of(Role.PREFILL) for key in p.first_index if key in p.writing]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            index = player.first_index.pop(key)
            self.house.output(_node(player), token(key, index, FinishReason.LENGTH if index == LENGTH - 1 else None))

    @rule(data=st.data())
    def decode_token(self, data: st.DataObject) -> None:
        choices = [(p, key) for p in self._of(Role.DECODE) for key, index in p.made.items() if index < LENGTH]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            index = player.made[key]
            player.made[key] += 1
            player.quiet.add(key)  # every page has arrived
            last = index == LENGTH - 1
            if last:
                player.made.pop(key)
                player.first_index.pop(key)
            self.house.output(_node(player), token(key, index, FinishReason.LENGTH if last else None))

    @rule(data=st.data())
    def unified_step(self, data: st.DataObject) -> None:
        """A request is admitted, or its next token is made."""
        choices = [(p, key) for p in self._of(Role.UNIFIED) for key in p.first_index]
        if not choices:
            return
        player, key = data.draw(st.sampled_from(choices))
        if key not in player.made:
            player.made[key] = player.first_index[key]
            self.house.output(_node(player), admitted=(AdmitReport(key, 0),))
            return
        index = player.made[key]
        player.made[key] += 1
        last = index == LENGTH - 1
        if last:
            player.end(key)
        self.house.output(_node(player), token(key, index, FinishReason.LENGTH if last else None))

    @rule(data=st.data(), retracted=st.booleans())
    def room_failed(self, data: st.DataObject, retracted: bool) -> None:
        choices = [(p, key) for p in self.players.values() for key in p.first_index]
        if choices:
            player, key = data.draw(st.sampled_from(choices))
            player.end(key)
            reason = "retracted" if retracted else "broken"
            self.house.report(_node(player), RoomFailed(key, "transferring", reason))

    @rule(data=st.data())
    def transfers_fail(self, data: st.DataObject) -> None:
        """Of requests that are not looked at here, until two nodes are set aside with each other."""
        writers, readers = self._of(Role.PREFILL), self._of(Role.DECODE)
        if writers and readers:
            writer, reader = data.draw(st.sampled_from(writers)), data.draw(st.sampled_from(readers))
            for _ in range(FAILURES):
                self.house.front.attempts.pairs.failed(writer.identity, reader.identity, math.inf)

    @rule(data=st.data())
    def quiesced(self, data: st.DataObject) -> None:
        """A writer has nothing in progress any more, whether or not it can say so."""
        choices = [(p, key) for p in self.players.values() for key in p.writing]
        if choices:
            self._falls_silent(*data.draw(st.sampled_from(choices)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.requests)))
        self.house.front.stop(request, FinishReason.ABORT, "gone")

    @rule(seconds=st.sampled_from([0.1, 0.6, 5.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.house.clock.advance(seconds)
        for node in self.house.front.registry.nodes():
            node.heard = self.house.clock()
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
        """Sessions are there again, clients give up, writers fall silent: then no page is fenced."""
        front = self.house.front
        for player in self.players.values():
            if player.node is None:
                self._attach(player)
        for request in self.requests:
            front.stop(request, FinishReason.ABORT, "gone")
        for player in (*self._of(Role.DECODE), *self._of(Role.PREFILL), *self._of(Role.UNIFIED)):
            self._read_commands(player)
            assert player.role is not Role.UNIFIED or not player.first_index, "a room nobody ended"
        for player in self._of(Role.PREFILL):
            for key in tuple(player.writing):
                self._falls_silent(player, key)
        for player in self._of(Role.DECODE):
            self._read_commands(player)
            assert not self._fenced(player)
            assert not player.made, "a room nobody ended"
        for player in self.players.values():
            front.leave(_node(player), "gone")
        assert not front.requests
        self.house.check()

    def _watch_reservations(self) -> None:
        """A pair set aside is used only when no other could be."""
        attempts = self.house.front.attempts
        real = attempts._reserve

        def reserve(attempt: Attempt, writer: Node, node: Node) -> None:
            if attempts.pairs.set_aside(writer.identity, node.identity):
                writers, readers = (attempts._fitting(attempt, role) for role in Role.PREFILL.pools)
                assert all(attempts.pairs.set_aside(w.identity, r.identity) for w in writers for r in readers)
            real(attempt, writer, node)

        attempts._reserve = reserve  # type: ignore[method-assign]

    # ---- the nodes' part ----

    def _of(self, role: Role) -> list[Player]:
        return [player for player in self.players.values() if player.role is role and player.node is not None]

    def _attach(self, player: Player, pages: int = 100) -> None:
        name, incarnation = player.identity.node_id, player.identity.incarnation
        player.node = self.house.join(player.role, name, incarnation=incarnation, num_pages=pages)
        player.read = 0
        for key in self._fenced(player):
            self.house.report(player.node, RoomFenced(key, player.writers[key]))

    def _fenced(self, player: Player) -> list[RoomKey]:
        """That a process has died, and so writes no more, decode nodes learn from their transfer layer."""
        return [key for key in player.fenced if player.writers[key] in self.players]

    def _falls_silent(self, player: Player, key: RoomKey) -> None:
        player.writing.pop(key)
        if player.node is not None and (key in player.to_answer or key in player.first_index):
            player.to_answer.discard(key)
            self.house.report(player.node, RoomQuiesced(key))

    def _read_commands(self, player: Player) -> None:
        if player.node is None:
            return
        sent = self.house.links[player.node].sent
        while player.read < len(sent):
            command = sent[player.read]
            player.read += 1
            self._obey(player, player.node, command)

    def _obey(self, player: Player, node: Node, command: Command) -> None:
        match command:
            case Submit(task):
                player.first_index[task.key] = task.first_index
            case Granted(key):
                if key in player.first_index:
                    player.writing[key] = None
            case Reserve(reservation):
                player.first_index[reservation.key] = reservation.first_index
                player.writers[reservation.key] = reservation.writer
            case Abort(key):
                player.end(key)
                if player.role is Role.PREFILL and key in player.writing:
                    player.to_answer.add(key)
                elif player.role is Role.PREFILL:
                    self.house.report(node, RoomQuiesced(key))
            case WriterQuiesced(key):
                player.quiet.add(key)
                player.fenced.discard(key)
                writer = self.players.get(player.writers[key])
                assert writer is None or key not in writer.writing, "a page came free that is written to"
            case PeerJoined(peer):
                for key in self._fenced(player):
                    if player.writers[key] == peer.identity:
                        self.house.report(node, RoomFenced(key, peer.identity))


def _node(player: Player) -> Node:
    assert player.node is not None
    return player.node


FrontDoorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestFrontDoor = FrontDoorMachine.TestCase
