"""A cluster over mTLS with a join token and API keys: who has them is served, and who has not is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.core.access import DialTls, new_key
from kvrelay.v1 import admin_pb2_grpc, generation_pb2_grpc
from rpc.security import open_channel
from tests.helpers.certificates import Authority
from tests.helpers.cluster import Cluster
from tests.helpers.models import tiny_model
from tests.helpers.reference import greedy

PROMPT = [3 + 7 * i % 250 for i in range(100)]
NODE_FLAGS = ("--page-size", "16", "--num-pages", "128")


@dataclass(frozen=True, slots=True)
class Guarded:
    """A running cluster and what opens it."""

    cluster: Cluster
    node_tls: tuple[str, ...]
    client_tls: tuple[str, ...]
    user: str
    admin: str

    def kvrelay(self, *argv: str, key: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli.main", *argv, "--bootstrap", self.cluster.address, *self.client_tls]
        env = os.environ | {"KVRELAY_API_KEY": key}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("guarded")
    authority = Authority(directory)
    front, node, client = (authority.sign(name) for name in ("front", "node", "client"))
    (user, users), (admin, admins) = new_key("user", admin=False), new_key("admin", admin=True)
    (directory / "keys").write_text(f"# two\n{users.line}\n{admins.line}\n")
    (directory / "token").write_text("sesame\n")
    token = ("--join-token-file", f"{directory}/token")
    front_tls = ("--tls-cert", str(front.cert), "--tls-key", str(front.key), "--tls-client-ca", str(authority.ca))
    node_tls, client_tls = (
        ("--tls-ca", str(authority.ca), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
        for pair in (node, client)
    )
    with closing(Cluster(directory, str(model))) as cluster:
        cluster.channel.close()
        dial = DialTls(authority.ca, client.cert, client.key)
        cluster.channel = open_channel(cluster.address, dial, admin, ())
        cluster.generation = generation_pb2_grpc.GenerationStub(cluster.channel)
        cluster.admin = admin_pb2_grpc.AdminStub(cluster.channel)
        cluster.start("bootstrap", "bootstrap", *front_tls, *token, "--api-keys-file", f"{directory}/keys")
        for role in ("prefill", "decode"):
            cluster.start(role, f"{role}-0", *NODE_FLAGS, *node_tls, *token)
        cluster.wait_serving(1, 1)
        yield Guarded(cluster, node_tls, client_tls, user, admin)


def test_who_has_certificate_and_key_is_answered(guarded: Guarded, model: Path) -> None:
    ids = ",".join(map(str, PROMPT))
    flags = ("--max-new-tokens", "12", "--temperature", "0", "--ignore-eos", "--json")
    done = guarded.kvrelay("generate", "--token-ids", ids, *flags, key=guarded.user)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == greedy(model, PROMPT, 12)
    guarded.cluster.settle()


def test_who_has_no_key_or_not_an_admins_is_told(guarded: Guarded) -> None:
    assert guarded.kvrelay("status", key=guarded.admin).returncode == 0
    for command, key, code in (
        (("status",), guarded.user, "PERMISSION_DENIED"),
        (("status",), "", "UNAUTHENTICATED"),
        (("generate", "hi"), "", "UNAUTHENTICATED"),
        (("generate", "hi"), "kvrelay-wrong", "UNAUTHENTICATED"),
    ):
        done = guarded.kvrelay(*command, key=key)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"kvrelay: {code}: ")
    guarded.cluster.settle()


@pytest.mark.parametrize("word", ["", "open"])
def test_a_node_without_the_join_token_leaves(guarded: Guarded, word: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(word)
    token = ("--join-token-file", f"{tmp_path}/token") if word else ()
    stray = guarded.cluster.start("decode", f"stray-{word}", *NODE_FLAGS, *guarded.node_tls, *token)
    del guarded.cluster.processes[stray.name]
    assert stray.popen.wait(60) == 1
    said = [line for line in stray.tail().splitlines() if "refused by the bootstrap" in line]
    assert len(said) == 1
    assert "join token" in said[0]
    assert {node.node_id for node in guarded.cluster.nodes()} == {"prefill-0", "decode-0"}
    guarded.cluster.settle()


def test_no_secret_is_in_a_log(guarded: Guarded) -> None:
    logs = "".join(process.log.read_text() for process in guarded.cluster.processes.values())
    assert logs
    assert not any(secret in logs for secret in ("sesame", guarded.user, guarded.admin))
