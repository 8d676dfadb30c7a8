"""Who gets in: TLS, the join token, API keys and limits, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import rpc.session
from cli.client import named_error
from engine.core.access import BootstrapAccess, DialTls, NodeAccess, new_key
from engine.core.errors import (
    ConfigError,
    KVRelayError,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from engine.core.messages import LinkUp
from engine.core.node_config import NodeConfig
from engine.core.types import Role
from kvrelay.v1 import admin_pb2, bootstrap_pb2, generation_pb2
from kvrelay.v1.bootstrap_pb2_grpc import BootstrapStub
from kvrelay.v1.generation_pb2_grpc import GenerationStub
from rpc.errors import from_rpc_error
from rpc.node import Rank, run_node
from rpc.security import open_channel, open_channel_aio, server_credentials
from rpc.server import RpcServer
from rpc.session import Session, end
from tests.helpers.bootstrap_peer import bootstrap_peer
from tests.helpers.certificates import Authority, Pair
from tests.helpers.cluster import free_port
from tests.helpers.front_cluster import FrontCluster, Reply, assert_soon, front_cluster
from tests.helpers.tiny_engine import TinyEngine, registration, until

SERVING = health_pb2.HealthCheckResponse.SERVING
USER, USER_KEY = new_key("user", admin=False)
ADMIN, ADMIN_KEY = new_key("admin", admin=True)
KEYS = f"{USER_KEY.line}\n{ADMIN_KEY.line}\n"
GUARDED = BootstrapAccess(join_token="sesame", api_keys=KEYS)
Metadata = tuple[tuple[str, str], ...]


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


async def failure(call: Awaitable[Any]) -> KVRelayError:
    """The named error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        async with asyncio.timeout(10):
            await call
    return from_rpc_error(caught.value)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.session, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(rpc.session, "MAX_BACKOFF_S", 0.05)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def server_pair(authority: Authority) -> Pair:
    return authority.sign("server")


@pytest.fixture(scope="module")
def caller_pair(authority: Authority) -> Pair:
    return authority.sign("caller")


# ---- TLS ----


async def health(address: str, tls: DialTls) -> int:
    async with open_channel_aio(address, tls, ()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status  # type: ignore[no-any-return]


@asynccontextmanager
async def tls_server(pair: Pair, client_ca: Path | None = None) -> AsyncIterator[str]:
    server = RpcServer("127.0.0.1:0", credentials=server_credentials(pair.cert, pair.key, client_ca))
    await server.start()
    server.set_serving(True)
    try:
        yield f"localhost:{server.port}"
    finally:
        await server.stop(0)


async def test_tls_proves_who_the_server_is(authority: Authority, stranger: Authority, server_pair: Pair) -> None:
    async with tls_server(server_pair) as address:
        assert await health(address, DialTls(authority.ca)) == SERVING
        for tls in (DialTls(stranger.ca), DialTls()):
            assert isinstance(await failure(health(address, tls)), Unavailable)


async def test_mtls_proves_who_the_caller_is(
    authority: Authority, stranger: Authority, server_pair: Pair, caller_pair: Pair
) -> None:
    strange = stranger.sign("caller")
    async with tls_server(server_pair, authority.ca) as address:
        assert await health(address, DialTls(authority.ca, caller_pair.cert, caller_pair.key)) == SERVING
        for tls in (DialTls(authority.ca), DialTls(authority.ca, strange.cert, strange.key), DialTls()):
            assert isinstance(await failure(health(address, tls)), Unavailable)


async def test_blocking_callers_use_the_same_and_learn_what_is_wrong(
    authority: Authority, stranger: Authority, server_pair: Pair
) -> None:
    def ask(tls: DialTls) -> int:
        with open_channel(address, tls, None, ()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status  # type: ignore[no-any-return]

    async with tls_server(server_pair) as address:
        assert await asyncio.to_thread(ask, DialTls(authority.ca)) == SERVING
        for tls, why in ((DialTls(stranger.ca), "(TLS: CERTIFICATE_VERIFY_FAILED)"), (DialTls(), "does it want TLS")):
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(ask, tls)
            assert why in str(named_error(caught.value, address))


def test_files_that_have_gone_since_they_were_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        server_credentials(tmp_path / "cert", tmp_path / "key", None)
    with pytest.raises(ConfigError, match="No such file"):
        open_channel("localhost:1", DialTls(tmp_path / "ca"), None, ())


@pytest.mark.parametrize("port", ["99999", "65536", "-1", "http", ""])
async def test_ports_that_there_are_not(port: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"'127.0.0.1:{port}'; allowed: host:port, a port of 0 to 65535")):
        RpcServer(f"127.0.0.1:{port}")


# ---- nodes ----


@asynccontextmanager
async def session(address: str, access: NodeAccess) -> AsyncIterator[tuple[TinyEngine, asyncio.Task[None]]]:
    engine = TinyEngine()
    running = asyncio.create_task(Session([address], registration(), engine, lambda _: None, access).run())
    engine.start()
    try:
        yield engine, running
    finally:
        await end(running)
        await asyncio.to_thread(engine.stop)


@pytest.mark.parametrize("mutual", [False, True])
async def test_a_node_attaches_over_tls(
    tmp_path: Path, authority: Authority, server_pair: Pair, caller_pair: Pair, mutual: bool
) -> None:
    access = replace(GUARDED, tls_cert=server_pair.cert, tls_key=server_pair.key)
    dial = DialTls(authority.ca)
    if mutual:
        access = replace(access, tls_client_ca=authority.ca)
        dial = DialTls(authority.ca, caller_pair.cert, caller_pair.key)
    async with (
        front_cluster(tmp_path, access=access) as cluster,
        session(f"127.0.0.1:{cluster.server.port}", NodeAccess(dial, join_token="sesame")) as (engine, running),
    ):
        await until(lambda: LinkUp() in engine.taken, "it attaches")
        await until(lambda: bool(cluster.front.registry.serving(Role.PREFILL)), "it is heard of")
        assert not running.done()


async def test_a_node_without_the_right_certificate_goes_on_trying(
    tmp_path: Path, authority: Authority, server_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    access = replace(BootstrapAccess(), tls_cert=server_pair.cert, tls_key=server_pair.key, tls_client_ca=authority.ca)
    async with (
        front_cluster(tmp_path, access=access) as cluster,
        session(f"127.0.0.1:{cluster.server.port}", NodeAccess(DialTls(authority.ca))) as (_, running),
    ):
        await until(lambda: any(r.message == "no bootstrap; trying again" for r in caplog.records), "it says so")
        assert not running.done()
        assert not cluster.front.registry.nodes()


@pytest.mark.parametrize(("token", "reason"), [(None, "NO_JOIN_TOKEN"), ("open", "WRONG_JOIN_TOKEN")])
async def test_a_node_without_the_join_token_ends(tmp_path: Path, token: str | None, reason: str) -> None:
    async with (
        front_cluster(tmp_path, access=GUARDED) as cluster,
        session(f"127.0.0.1:{cluster.server.port}", NodeAccess(join_token=token)) as (engine, running),
    ):
        await asyncio.wait([running], timeout=10)
        refusals = running.exception()
        assert isinstance(refusals, ExceptionGroup)
        (error,) = refusals.exceptions
        assert isinstance(error, Unauthenticated)
        assert error.reason == reason
        assert engine.taken == []
        assert "sesame" not in str(error)


async def test_its_process_ends_with_one_line_that_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = TinyEngine()
    async with front_cluster(tmp_path, access=GUARDED) as cluster:
        config = NodeConfig(bootstrap=(f"127.0.0.1:{cluster.server.port}",), access=NodeAccess(join_token="open"))
        async with asyncio.timeout(10):
            assert await run_node([Rank(engine, registration())], config, lambda identity, stats: None) == 1
    (record,) = [r for r in caplog.records if r.levelno >= logging.CRITICAL]
    assert record.message == "refused by the bootstrap"
    assert vars(record)["error"] == "the join token is not the one of this cluster"


async def test_a_node_that_was_attached_goes_on_trying() -> None:
    async def refuse(_: Any) -> None:
        raise Unauthenticated("the token has changed", reason="WRONG_JOIN_TOKEN")

    async with bootstrap_peer() as peer, session(peer.address, NodeAccess(join_token="sesame")) as (_, running):
        (await peer.session()).end()
        peer.on_attach = refuse
        await until(lambda: peer.dialled > 3, "it dials again and again")
        assert not running.done()
        peer.on_attach = None
        await peer.session(2)


async def test_publish_needs_the_token_too_and_is_shown_it(tmp_path: Path) -> None:
    async with front_cluster(tmp_path, access=GUARDED) as cluster:
        for call in (
            BootstrapStub(cluster.channel).Publish(metadata=(("kvrelay-node", "x:1"),)),
            BootstrapStub(cluster.channel).MayAttach(bootstrap_pb2.Register()),
        ):
            assert (await failure(call)).reason == "NO_JOIN_TOKEN"
    shown: list[Any] = []

    async def look(context: Any) -> None:
        shown.append(dict(context.invocation_metadata()).get("kvrelay-join-token"))

    async with bootstrap_peer() as peer:
        peer.on_publish = look
        async with session(peer.address, NodeAccess(join_token="sesame")):
            await until(lambda: bool(shown), "it publishes")
    assert shown == ["sesame"]


async def test_a_nodes_health_is_served_with_its_certificate(
    tmp_path: Path, authority: Authority, caller_pair: Pair
) -> None:
    port = free_port()
    access = NodeAccess(DialTls(authority.ca, caller_pair.cert, caller_pair.key))
    config = NodeConfig(bootstrap=(f"127.0.0.1:{free_port()}",), listen=f"127.0.0.1:{port}", access=access)
    running = asyncio.create_task(run_node([Rank(TinyEngine(), registration())], config, lambda identity, stats: None))
    try:
        async with open_channel_aio(f"127.0.0.1:{port}", DialTls(authority.ca), ()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# ---- clients ----


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[FrontCluster]:
    async with front_cluster(tmp_path, access=GUARDED) as running:
        yield running


def get_model(cluster: FrontCluster, metadata: Metadata = ()) -> Awaitable[Any]:
    return cluster.generation.GetModel(generation_pb2.GetModelRequest(), timeout=10, metadata=metadata)  # type: ignore[no-any-return]


def list_nodes(cluster: FrontCluster, metadata: Metadata = ()) -> Awaitable[Any]:
    return cluster.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10, metadata=metadata)  # type: ignore[no-any-return]


async def test_any_key_opens_generation_and_an_admin_key_admin(guarded: FrontCluster) -> None:
    assert (await get_model(guarded, bearer(USER))).name == "tiny"
    assert (await get_model(guarded, (("authorization", f"bearer {ADMIN}"),))).name == "tiny"
    assert not (await list_nodes(guarded, bearer(ADMIN))).nodes
    error = await failure(list_nodes(guarded, bearer(USER)))
    assert isinstance(error, PermissionDenied)
    assert (error.reason, error.metadata) == ("NOT_ADMIN", {"key": "user"})


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "NO_API_KEY"),
        (bearer("kvrelay-nonsense"), "WRONG_API_KEY"),
        (bearer(USER_KEY.sha256.hex()), "WRONG_API_KEY"),
        (bearer(""), "WRONG_API_KEY"),
        ((("authorization", USER),), "WRONG_API_KEY"),
        ((("authorization", f"Basic {USER}"),), "WRONG_API_KEY"),
        ((("kvrelay-join-token", "sesame"),), "NO_API_KEY"),
    ],
)
async def test_without_a_key_nothing_but_health_and_reflection(
    guarded: FrontCluster, metadata: Metadata, reason: str
) -> None:
    for call in (get_model, list_nodes):
        error = await failure(call(guarded, metadata))
        assert isinstance(error, Unauthenticated)
        assert error.reason == reason
    health_stub = health_pb2_grpc.HealthStub(guarded.channel)
    assert (await health_stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata)).status == SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    assert [reply async for reply in stub.ServerReflectionInfo(asked, metadata=metadata)]


async def test_a_key_does_not_let_a_node_in_nor_another_method(guarded: FrontCluster) -> None:
    attach: Any = BootstrapStub(guarded.channel).Attach(metadata=bearer(ADMIN))
    assert (await failure(attach.read())).reason == "NO_JOIN_TOKEN"
    for method in ("/kvrelay.v1.Generation/Nothing", "/nothing", "//", "/"):
        invoke: Any = guarded.channel.unary_unary(method, None, None)
        error = await failure(invoke(b"", metadata=bearer(USER)))
        assert error.code in ("UNIMPLEMENTED", "INTERNAL"), method


async def test_callers_are_turned_away_before_they_are_read(guarded: FrontCluster) -> None:
    """Bytes that are no message, as a stream that never ends."""
    attach: Any = guarded.channel.stream_stream("/kvrelay.v1.Bootstrap/Attach", None, None)
    call = attach()
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # turned away already
        await call.write(b"\xff\xff\xff")
    assert (await failure(call.read())).reason == "NO_JOIN_TOKEN"
    for kind in ("unary_unary", "unary_stream"):
        invoke: Any = getattr(guarded.channel, kind)("/kvrelay.v1.Generation/Generate", None, None)
        call = invoke(b"\xff\xff\xff")
        assert (await failure(call if kind == "unary_unary" else call.read())).reason == "NO_API_KEY"


async def test_a_flood_of_callers_without_credentials_is_turned_away_and_leaves_nothing(guarded: FrontCluster) -> None:
    """Over several connections and all at once, more than grpc by itself lets wait; who has a key is answered."""
    tasks, address = len(asyncio.all_tasks()), f"127.0.0.1:{guarded.server.port}"
    async with contextlib.AsyncExitStack() as stack:
        flood: list[Any] = []
        for _ in range(3):
            private = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, private))
            generate = generation_pb2.GenerateRequest(text="x" * 1000)
            flood += [BootstrapStub(channel).Attach() for _ in range(500)]
            flood += [GenerationStub(channel).Generate(generate) for _ in range(500)]
        assert (await get_model(guarded, bearer(USER))).name == "tiny"
        assert not (await list_nodes(guarded, bearer(ADMIN))).nodes
        async with asyncio.timeout(20):
            assert {await call.code() for call in flood} == {grpc.StatusCode.UNAUTHENTICATED}
    await assert_soon(lambda: len(asyncio.all_tasks()) <= tasks, "nothing goes on for them")


async def test_blocking_callers_show_their_key_with_and_without_tls(
    tmp_path: Path, authority: Authority, server_pair: Pair
) -> None:
    def ask(address: str, tls: DialTls, key: str | None) -> list[str]:
        with open_channel(address, tls, key, ()) as channel:
            stub = GenerationStub(channel)
            model = stub.GetModel(generation_pb2.GetModelRequest(), timeout=10).name
            try:
                list(stub.Generate(generation_pb2.GenerateRequest(text=""), timeout=10))
            except grpc.RpcError as error:
                return [model, from_rpc_error(error).code]
            raise AssertionError("an empty prompt was answered")

    over_tls = replace(GUARDED, tls_cert=server_pair.cert, tls_key=server_pair.key)
    for access, tls in ((GUARDED, DialTls()), (over_tls, DialTls(authority.ca))):
        async with front_cluster(tmp_path, access=access) as cluster:
            address = f"127.0.0.1:{cluster.server.port}"
            assert await asyncio.to_thread(ask, address, tls, USER) == ["tiny", "INVALID_ARGUMENT"]
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(ask, address, tls, None)
            assert from_rpc_error(caught.value).reason == "NO_API_KEY"


async def test_a_key_aborts_its_own_requests_and_an_admin_key_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other, other_key = new_key("other", admin=False)
    access = BootstrapAccess(api_keys=f"{KEYS}{other_key.line}\n")
    async with front_cluster(tmp_path, access=access) as cluster:
        prefill, decode = await cluster.pair()
        for request_id, may in (("first", USER), ("second", ADMIN)):
            asked = generation_pb2.GenerateRequest(request_id=request_id, text="hello")
            reply = Reply(cluster.generation.Generate(asked, timeout=10, metadata=bearer(USER)))
            await cluster.bound(prefill, decode)
            abort = generation_pb2.AbortRequest(request_id=request_id)
            error = await failure(cluster.generation.Abort(abort, timeout=10, metadata=bearer(other)))
            assert isinstance(error, NotFound)
            await cluster.generation.Abort(abort, timeout=10, metadata=bearer(may))
            await reply.to_end()
    ended = [vars(record) for record in caplog.records if record.message == "request ended"]
    assert [(one["request_id"], one["client"]) for one in ended] == [("first", "user"), ("second", "user")]


async def test_an_id_that_another_key_uses_is_free(tmp_path: Path) -> None:
    async with front_cluster(tmp_path, access=BootstrapAccess(api_keys=KEYS)) as cluster:
        prefill, decode = await cluster.pair()
        asked = generation_pb2.GenerateRequest(request_id="same", text="hello")
        replies = []
        for key in (USER, ADMIN):
            replies.append(Reply(cluster.generation.Generate(asked, timeout=10, metadata=bearer(key))))
            await cluster.bound(prefill, decode)
        assert len(cluster.front.of_id("same")) == 2
        again = Reply(cluster.generation.Generate(asked, timeout=10, metadata=bearer(USER)))
        assert (await again.error()).code == "ALREADY_EXISTS"
        for key, reply in zip((USER, ADMIN), replies, strict=True):
            await cluster.generation.Abort(generation_pb2.AbortRequest(request_id="same"), metadata=bearer(key))
            await reply.to_end()


# ---- limits ----


def tokenize(cluster: FrontCluster, key: str | None = None) -> Awaitable[Any]:
    request = generation_pb2.TokenizeRequest(text="hello")
    return cluster.generation.Tokenize(request, timeout=10, metadata=bearer(key) if key else ())  # type: ignore[no-any-return]


async def test_the_rate_is_of_each_key(tmp_path: Path) -> None:
    access = replace(GUARDED, client_rate=0.01, client_burst=2)
    async with front_cluster(tmp_path, access=access) as cluster:
        for key in (USER, ADMIN):
            await tokenize(cluster, key)
            await cluster.generation.Detokenize(generation_pb2.DetokenizeRequest(), metadata=bearer(key))
        asked = generation_pb2.GenerateRequest(text="hello")
        detokenized = generation_pb2.DetokenizeRequest()
        for refused in (
            tokenize(cluster, USER),
            cluster.generation.Detokenize(detokenized, metadata=bearer(USER)),
            cluster.generation.Generate(asked, timeout=10, metadata=bearer(USER)).read(),
        ):
            error = await failure(refused)
            assert isinstance(error, Overloaded)
            assert (error.reason, error.metadata) == ("CLIENT_RATE", {"limit": "client_rate", "value": "0.01"})
            assert error.retry_after is not None
            assert 60 < error.retry_after <= 100
        assert (await get_model(cluster, bearer(USER))).name == "tiny", "what costs nothing is not counted"


async def test_without_keys_the_rate_is_of_an_address(tmp_path: Path) -> None:
    async with front_cluster(tmp_path, access=BootstrapAccess(client_rate=0.01, client_burst=1)) as cluster:
        await tokenize(cluster)
        options = (("grpc.use_local_subchannel_pool", 1),)  # else it would be the same connection
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.server.port}", options=options) as channel:
            call = GenerationStub(channel).Tokenize(generation_pb2.TokenizeRequest(text="hello"), timeout=10)
            assert (await failure(call)).reason == "CLIENT_RATE"


async def test_live_calls_are_released_however_they_end(tmp_path: Path) -> None:
    async with front_cluster(tmp_path, access=BootstrapAccess(client_concurrency=1)) as cluster:
        prefill, decode = await cluster.pair()

        async def one_more() -> KVRelayError:
            return await cluster.generate("one more").error()

        for _ in range(20):  # one right after the other, as soon as each has ended
            assert (await cluster.generate("").error()).code == "INVALID_ARGUMENT"
        for ending in ("cancelled", "late", "aborted"):
            reply = cluster.generate("hello", timeout=0.3 if ending == "late" else 10.0, request_id=ending)
            await cluster.bound(prefill, decode)
            error = await one_more()
            assert isinstance(error, Overloaded)
            assert (error.reason, error.metadata) == (
                "CLIENT_CONCURRENCY",
                {"limit": "client_concurrency", "value": "1"},
            )
            match ending:
                case "cancelled":
                    reply.call.cancel()
                case "late":
                    assert (await reply.error()).code == "DEADLINE_EXCEEDED"
                case "aborted":
                    await cluster.generation.Abort(generation_pb2.AbortRequest(request_id=ending))
                    await reply.to_end()
            await cluster.idle()
            await tokenize(cluster)
