"""Starting, watching and stopping child processes: small scripts, but real processes and real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.config import BootstrapConfig
from cli.cluster import Interrupts
from cli.main import main
from cli.plan import Plan, claim_addresses, invitation, plan_cluster
from cli.services import load_service
from decode_service.config import DecodeConfig
from engine.core.access import new_key
from engine.core.errors import ConfigError
from engine.core.types import Role
from prefill_service.config import PrefillConfig
from tests.helpers.certificates import Authority
from tests.helpers.cluster import assert_eventually

ROOT = Path(__file__).parents[2]

# A bootstrap that lists the nodes that a file names, all serving. SIGTERM ends it with 0.
BOOTSTRAP = """
import signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, types_pb2
class Admin(admin_pb2_grpc.AdminServicer):
    def ListNodes(self, request, context):
        names = open(sys.argv[2]).read().split()
        role = lambda n: types_pb2.ROLE_PREFILL if n.startswith("prefill") else types_pb2.ROLE_DECODE
        serving = types_pb2.NodeStats(serving=True)
        nodes = [admin_pb2.Node(node_id=n, incarnation=n, role=role(n), stats=serving) for n in names]
        return admin_pb2.ListNodesResponse(nodes=nodes)
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: (print("bootstrap stops", flush=True), over.set()))
server = grpc.server(ThreadPoolExecutor(2))
admin_pb2_grpc.add_AdminServicer_to_server(Admin(), server)
server.add_insecure_port(sys.argv[1])
server.start()
over.wait()
server.stop(0).wait()
"""

# A node that drains for a moment when told to; a second SIGTERM makes it leave at once.
NODE = """
import signal, sys, threading
signals, told = [], threading.Event()
def on_signal(*_):
    signals.append(1)
    print(sys.argv[1], "told", len(signals), flush=True)
    told.set()
signal.signal(signal.SIGTERM, on_signal)
print(sys.argv[1], "runs", flush=True)
told.wait()
if sys.argv[2] == "slow":
    told.clear()
    told.wait()
print(sys.argv[1], "leaves", flush=True)
"""

# What `kvrelay up` does, with a plan of such children.
UP = """
import dataclasses, sys
from cli.cluster import Cluster, Interrupts
from cli.plan import Plan
from engine.core.errors import KVRelayError
from engine.core.node_config import NodeConfig
commands, patience = eval(sys.argv[2]), float(sys.argv[3])
env = dict(__import__("os").environ)
roles = {name: name.split("-")[0] for name in commands}
plan = Plan(tuple(sys.argv[1].split(",")), (), NodeConfig(drain_timeout=patience), commands, roles, env)
with Interrupts() as interrupts:
    cluster = Cluster(plan, interrupts)
    try:
        with cluster:
            cluster.start(20)
            print("serving", flush=True)
            cluster.watch()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except KVRelayError as error:
        print(error, flush=True)
print("orderly" if cluster.orderly else "disorderly", flush=True)
"""


class Up:
    """The parent process: what it says, line by line. After a line that begins with `until`, nobody reads on."""

    def __init__(self, process: subprocess.Popen[str], nodes: Path, until: str | None):
        self.process = process
        self.nodes = nodes  # what the bootstrap lists
        self._until = until
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                with self._news:
                    self.lines.append(line.rstrip())
                    self._news.notify_all()
                if self._until is not None and line.startswith(self._until):
                    return

    def wait_for(self, *lines: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: set(lines) <= set(self.lines), timeout=20), self.lines

    def closed(self) -> None:
        """Wait until nobody reads any more."""
        self._reader.join(timeout=20)
        assert not self._reader.is_alive(), self.lines

    def ended(self) -> list[str]:
        assert self.process.wait(timeout=20) == 0
        self.closed()
        return self.lines

    def pids(self) -> dict[str, int]:
        (line,) = [line for line in self.lines if line.startswith("started")]
        names, ids = line.removeprefix("started ").removesuffix(")").split(" (process ids ")
        return dict(zip(names.split(", "), map(int, ids.split(", ")), strict=True))

    def orphans(self) -> list[str]:
        return [name for name, pid in self.pids().items() if runs(pid)]


def runs(pid: int) -> bool:
    """Whether a process does anything: it may have ended and wait for whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def started(
    prefill: str = NODE,
    how: str = "quick",
    patience: float = 20,
    until: str | None = None,
    prelude: str = "",
    bootstraps: int = 1,
) -> Iterator[Up]:
    with tempfile.TemporaryDirectory() as directory:
        nodes = Path(directory, "nodes")
        nodes.write_text("prefill-0 decode-0")
        with launched(nodes, prefill, how, patience, until, prelude, bootstraps) as up:
            yield up


@contextlib.contextmanager
def launched(
    nodes: Path, prefill: str, how: str, patience: float, until: str | None, prelude: str, bootstraps: int
) -> Iterator[Up]:
    addresses = claim_addresses("127.0.0.1:0", bootstraps)
    names = ("bootstrap",) if bootstraps == 1 else tuple(f"bootstrap-{i}" for i in range(bootstraps))
    commands = {
        **{name: (sys.executable, "-c", BOOTSTRAP, at, str(nodes)) for name, at in zip(names, addresses, strict=True)},
        "prefill-0": (sys.executable, "-c", prefill, "prefill-0", how),
        "decode-0": (sys.executable, "-c", NODE, "decode-0", "quick"),
    }
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "proto", "kernels"))}
    command = [sys.executable, "-c", prelude + UP, ",".join(addresses), repr(commands), str(patience)]
    command.append(str(nodes.parent / "now"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        up = Up(process, nodes, until)
        try:
            yield up
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            finally:
                process.kill()  # of a test that failed; else it has ended
            up.closed()
            for name in up.orphans():  # of a test that failed
                os.kill(up.pids()[name], signal.SIGKILL)


def serving(up: Up) -> None:
    up.wait_for("serving", "prefill-0 | prefill-0 runs", "decode-0 | decode-0 runs")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_bootstrap_leaves_before_the_nodes(number: signal.Signals) -> None:
    """It waits until all it has taken in is answered, for which nodes have to be there."""
    with started() as up:
        serving(up)
        up.process.send_signal(number)
        lines = up.ended()
    assert lines[-2:] == ["interrupted", "orderly"]
    leaving = [line for line in lines if line.endswith(("leaves", "stops"))]
    assert leaving[:1] == ["bootstrap | bootstrap stops"]
    assert sorted(leaving[1:]) == ["decode-0 | decode-0 leaves", "prefill-0 | prefill-0 leaves"]


def test_second_signal_is_passed_on() -> None:
    with started(how="slow") as up:
        serving(up)
        up.process.send_signal(signal.SIGINT)
        up.wait_for("prefill-0 | prefill-0 told 1", "decode-0 | decode-0 leaves")
        up.process.send_signal(signal.SIGINT)
        lines = up.ended()
    assert "prefill-0 | prefill-0 told 2" in lines
    assert lines[-2:] == ["interrupted", "orderly"]


STUBBORN = """
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("prefill-0 runs", flush=True)
threading.Event().wait()
"""


def test_deadline_kills_what_does_not_leave() -> None:
    with started(prefill=STUBBORN, patience=-4.5) as up:  # half a second in all
        serving(up)
        up.process.send_signal(signal.SIGINT)
        lines = up.ended()
    assert "prefill-0 did not leave in time and is killed" in lines
    assert lines[-1] == "disorderly"


def test_death_of_a_needed_child_ends_the_cluster() -> None:
    with started() as up:
        serving(up)
        os.kill(up.pids()["prefill-0"], signal.SIGKILL)
        lines = up.ended()
    assert "  prefill-0 | prefill-0 runs" in lines  # its last words again, where one looks for them
    assert lines[-2:] == ["prefill-0 ended with SIGKILL, and no prefill node is left", "disorderly"]


def test_cluster_goes_on_while_a_bootstrap_is_left() -> None:
    with started(bootstraps=2) as up:
        serving(up)
        os.kill(up.pids()["bootstrap-0"], signal.SIGKILL)
        up.wait_for("bootstrap-0 ended with SIGKILL; the others go on")
        up.nodes.write_text("prefill-0 decode-0 decode-by-hand")
        os.kill(up.pids()["decode-0"], signal.SIGTERM)
        up.wait_for("decode-0 has left; decode-by-hand goes on")  # as the other bootstrap says
        os.kill(up.pids()["bootstrap-1"], signal.SIGKILL)
        lines = up.ended()
    assert lines[-2:] == ["bootstrap-1 ended with SIGKILL", "disorderly"]


def test_cluster_goes_on_while_a_node_started_by_hand_has_the_pool() -> None:
    with started() as up:
        serving(up)
        up.nodes.write_text("prefill-0 decode-0 decode-by-hand")
        os.kill(up.pids()["decode-0"], signal.SIGTERM)  # which is how a drained node ends, too
        up.wait_for("decode-0 has left; decode-by-hand goes on")
        up.nodes.write_text("prefill-0")
        lines = up.ended()
    assert lines[-2:] == ["decode-0 has left, and no decode node is left", "orderly"]


# Ctrl-C at the worst moment: inside Popen.poll, which then keeps its lock for ever.
CTRL_C_WITHIN_POLL = """
import os, signal, subprocess, sys
class Popen(subprocess.Popen):
    def poll(self):
        if os.path.exists(sys.argv[4]):
            self._waitpid_lock.acquire()
            os.unlink(sys.argv[4])
            signal.raise_signal(signal.SIGINT)
            self._waitpid_lock.release()
        return super().poll()
subprocess.Popen = Popen
"""


def test_ctrl_c_while_children_are_looked_after() -> None:
    with started(prelude=CTRL_C_WITHIN_POLL) as up:
        serving(up)
        (up.nodes.parent / "now").touch()
        lines = up.ended()
    assert lines[-2:] == ["interrupted", "orderly"]


# In the next tests `prefill-0` ends by SIGKILL only: the kernel's SIGTERM to the children of a process that has ended
# must not be what ends them.


def test_nothing_is_left_when_the_reader_goes_first() -> None:  # kvrelay up 2>&1 | tee log, Ctrl-C
    with started(prefill=STUBBORN, patience=-4.5, until="serving") as up:
        up.closed()
        up.process.send_signal(signal.SIGINT)
        up.process.wait(timeout=20)
        assert up.orphans() == []


def test_nothing_is_left_when_nobody_reads_an_answer() -> None:  # kvrelay demo 2>&1 | head -2
    with started(prefill=STUBBORN, patience=-4.5, until="started") as up:
        up.process.wait(timeout=20)  # by itself: "serving" cannot be written
        assert up.orphans() == []


def test_nothing_is_left_when_the_terminal_is_closed() -> None:
    with started(prefill=STUBBORN, patience=-4.5) as up:
        up.wait_for("serving")
        up.process.send_signal(signal.SIGHUP)
        lines = up.ended()
        assert up.orphans() == []
    assert lines[-2:] == ["interrupted", "disorderly"]


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_hangup_is_no_impatience() -> None:
    with Interrupts() as interrupts:
        interrupts.quiet = True
        for number, count in ((signal.SIGHUP, 1), (signal.SIGHUP, 1), (signal.SIGINT, 2)):
            signal.raise_signal(number)
            assert interrupts.count == count


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked to end the children")
def test_nothing_is_left_when_the_parent_is_killed() -> None:
    with started() as up:
        serving(up)
        up.process.kill()
        up.process.wait(timeout=20)
        assert_eventually(lambda: up.orphans() == [], "the children end")


def test_child_that_fails_to_start_is_reported() -> None:
    with started(prefill="raise SystemExit('no such model')") as up:
        lines = up.ended()
    assert "  prefill-0 | no such model" in lines
    # Whether it is noticed at the start or just after depends on how fast the stand-ins are.
    assert lines[-2].startswith("prefill-0 ended with exit code 1")
    assert lines[-1] == "disorderly"


def planned(env: dict[str, str], **flags: object) -> Plan:
    return plan_cluster({Role.PREFILL: 2, Role.DECODE: 1}, ("127.0.0.1:7070",), flags, env)


def test_plan_gives_every_child_its_options() -> None:
    plan = planned({"KVRELAY_LISTEN": "0.0.0.0:1", "KVRELAY_CHUNK_SIZE": "64"}, page_size="32", max_running="4")
    assert list(plan.commands) == ["bootstrap", "prefill-0", "prefill-1", "decode-0"]
    decode, prefill = " ".join(plan.commands["decode-0"]), " ".join(plan.commands["prefill-1"])
    assert "--listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --bootstrap 127.0.0.1:7070" in decode
    assert "--node-id decode-0" in decode
    assert "--page-size=32" in decode
    assert "--max-running=4" in decode
    assert "--max-running" not in prefill
    assert "--listen 127.0.0.1:7070" in " ".join(plan.commands["bootstrap"])


def test_plan_of_unified_nodes() -> None:
    flags = {"policy": "lpm", "max_running": "4"}
    plan = plan_cluster({Role.UNIFIED: 2}, ("127.0.0.1:7070",), flags, {})
    assert dict(plan.roles) == {"bootstrap": "bootstrap", "unified-0": "unified", "unified-1": "unified"}
    assert {"--node-id", "unified-1", "--policy=lpm", "--max-running=4"} <= set(plan.commands["unified-1"])
    with pytest.raises(ConfigError, match="chunk_size is 64; allowed: at least 80 with mixed_chunk"):
        plan_cluster({Role.UNIFIED: 2}, ("127.0.0.1:7070",), {"chunk_size": "64"}, {})


def test_options_of_what_is_not_started_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cluster({Role.UNIFIED: 1}, ("127.0.0.1:7070",), {"dp_size": "2", "reserved_decode_tokens": "9"}, {})
    assert caught.value.problems == (
        "--dp-size: an option of prefill nodes, and none is started",
        "--reserved-decode-tokens: an option of decode nodes, and none is started",
    )


@pytest.mark.parametrize("other", [["--prefill", "2"], ["--decode", "1"]])
def test_unified_nodes_stand_alone(capsys: pytest.CaptureFixture[str], other: list[str]) -> None:
    assert main(["up", "--unified", "1", *other, "--address", "127.0.0.1:0"], {}) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvrelay: --unified goes with neither --prefill nor --decode: ")


def test_plan_keeps_secrets_out_of_commands_and_takes_an_admin_key(tmp_path: Path) -> None:
    (user, users), (admin, admins) = new_key("user", admin=False), new_key("admin", admin=True)
    keys, own = tmp_path / "keys", tmp_path / "own"
    keys.write_text(f"{users.line}\n{admins.line}\n")
    own.write_text(admin)
    env = {"KVRELAY_JOIN_TOKEN": "sesame", "KVRELAY_API_KEYS": keys.read_text(), "KVRELAY_API_KEY": admin}
    plan = planned(env)
    assert plan.access.api_key == admin
    assert plan.env.items() >= env.items()
    words = " ".join(word for command in plan.commands.values() for word in command)
    assert not any(secret in words for secret in ("sesame", admin, admins.line))
    plan = planned({}, api_keys_file=str(keys), api_key_file=str(own), join_token_file=str(own))
    assert plan.access.api_key == admin
    assert f"--api-keys-file={keys}" in plan.commands["bootstrap"]
    assert all(f"--join-token-file={own}" in command for command in plan.commands.values())
    assert not any("--api-key-file" in word for command in plan.commands.values() for word in command)
    for key in ({}, {"KVRELAY_API_KEY": user}, {"KVRELAY_API_KEY": "other"}):
        with pytest.raises(ConfigError, match="admin key of the API keys"):
            planned({"KVRELAY_API_KEYS": keys.read_text(), **key})


def test_a_cluster_for_others_is_reached_on_loopback() -> None:
    nodes = {Role.UNIFIED: 1}
    with pytest.raises(ConfigError, match="join token"):
        plan_cluster(nodes, ("0.0.0.0:7070",), {}, {})
    for listen, dialled in (("0.0.0.0:7070", "127.0.0.1:7070"), ("[::]:7070", "[::1]:7070")):
        plan = plan_cluster(nodes, (listen,), {"insecure_listen": True}, {})
        assert plan.bootstraps == dialled
        assert {"--listen", listen, "--insecure-listen"} <= set(plan.commands["bootstrap"])
        assert dialled in plan.commands["unified-0"]
        assert "--insecure-listen" not in plan.commands["unified-0"]


def test_threads_are_the_cores_shared_out() -> None:
    cores = len(os.sched_getaffinity(0))
    assert planned({}).env["OMP_NUM_THREADS"] == str(max(1, cores // 3))
    assert planned({}, threads="5").env["OMP_NUM_THREADS"] == "5"
    given = planned({"OMP_NUM_THREADS": "7"})
    assert given.env["OMP_NUM_THREADS"] == "7"
    assert not any("--threads" in word for word in given.commands["decode-0"])


def test_ranks_share_the_cores_and_are_all_waited_for() -> None:
    plan = planned({}, dp_size="3")
    assert plan.env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 7))
    assert plan.node_ids("prefill-1") == ("prefill-1.0", "prefill-1.1", "prefill-1.2")
    assert plan.node_ids("decode-0") == ("decode-0",)
    assert planned({}).node_ids("prefill-1") == ("prefill-1",)


def test_one_file_serves_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.toml").write_text('max_queue = 7\nmax_running = 3\nchunk_size = 64\nlisten = "127.0.0.1:1"\n')
    monkeypatch.chdir(tmp_path)
    plan = plan_cluster({Role.PREFILL: 1, Role.DECODE: 1}, ("127.0.0.1:7070",), {}, {}, Path("cluster.toml"))
    for command in plan.commands.values():
        (file,) = [word.removeprefix("--config=") for word in command if word.startswith("--config=")]
        assert Path(file) == tmp_path / "cluster.toml"  # wherever the child runs
    assert load_service(BootstrapConfig, tmp_path / "cluster.toml", {}, {}).max_queue == 7
    assert load_service(DecodeConfig, tmp_path / "cluster.toml", {}, {}).decode.max_running == 3
    assert load_service(PrefillConfig, tmp_path / "cluster.toml", {}, {}).scheduler.chunk_size == 64


@pytest.mark.parametrize("by_flag", [True, False])
def test_mistake_in_the_file_is_found_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by_flag: bool
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("max_que = 7\n")
    argv, env = (["--config", str(file)], {}) if by_flag else ([], {"KVRELAY_CONFIG": str(file)})
    assert main(["up", "--address", "127.0.0.1:0", *argv], env) == 2
    assert capsys.readouterr().err == f"kvrelay: max_que in {file}: no such option, did you mean max_queue?\n"


def test_metrics_address_of_the_bootstrap_is_known() -> None:
    plan = planned({})
    (metrics,) = plan.metrics
    assert f"--metrics-listen {metrics}" in " ".join(plan.commands["bootstrap"])
    assert not metrics.endswith(":0")


def test_several_bootstraps_have_ports_in_a_row_and_every_node_knows_all() -> None:
    listen = ("127.0.0.1:7070", "127.0.0.1:7071")
    plan = plan_cluster({Role.UNIFIED: 1}, listen, {}, {}, metrics="127.0.0.1:0")
    assert list(plan.commands) == ["bootstrap-0", "bootstrap-1", "unified-0"]
    assert plan.roles["bootstrap-1"] == "bootstrap"
    assert "--listen 127.0.0.1:7071" in " ".join(plan.commands["bootstrap-1"])
    assert "--bootstrap 127.0.0.1:7070,127.0.0.1:7071" in " ".join(plan.commands["unified-0"])
    assert len(set(plan.metrics)) == 2
    assert invitation(plan).startswith("kvrelay chat --bootstrap 127.0.0.1:7070,127.0.0.1:7071 ")


def test_metrics_address_may_be_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plan = plan_cluster({Role.UNIFIED: 1}, ("127.0.0.1:7070",), {}, {}, metrics=f"127.0.0.1:{port}")
    assert plan.metrics == (f"127.0.0.1:{port}",)
    assert f"--metrics-listen 127.0.0.1:{port}" in " ".join(plan.commands["bootstrap"])
    assert "--metrics-listen 127.0.0.1:0" in " ".join(plan.commands["unified-0"])


def test_what_is_suggested_repeats_what_a_client_needs(tmp_path: Path) -> None:
    admin, admins = new_key("admin", admin=True)
    own, keys = tmp_path / "own key", tmp_path / "keys"
    own.write_text(admin)
    keys.write_text(admins.line)
    (tmp_path / "cluster.toml").write_text(f'api_key_file = "{own}"\napi_keys_file = "{keys}"\n')
    listen = ("127.0.0.1:7070",)
    plan = plan_cluster({Role.UNIFIED: 1}, listen, {}, {}, tmp_path / "cluster.toml")
    assert invitation(plan).endswith(f"--bootstrap 127.0.0.1:7070 '--api-key-file={own}' \"Why is the sky blue?\"")
    plan = planned({"KVRELAY_API_KEY": admin, "KVRELAY_API_KEYS": admins.line})
    assert invitation(plan).startswith("KVRELAY_API_KEY=… kvrelay chat ")
    assert admin not in invitation(plan)
    authority = Authority(tmp_path)
    pair = authority.sign("all")
    plan = planned({}, tls_ca=str(authority.ca), tls_cert=str(pair.cert), tls_key=str(pair.key))
    assert f" --tls-ca={authority.ca} --tls-cert={pair.cert} --tls-key={pair.key} " in invitation(plan)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("page_size", "none", "^--page-size: 'none' is not a whole number$"),
        ("host_kv_memory", "999TiB", r"^host_kv_memory is 999TiB; allowed: at most \d+, the memory of this host"),
        ("log_passes", "/", "^log_passes: cannot write /: Is a directory"),
        ("log_passes", "/" + "x" * 300, "^log_passes: cannot write /x+: File name too long"),
        ("log_passes", "/nowhere/passes", "^log_passes: cannot write /nowhere/passes: No such file or directory"),
    ],
)
def test_mistakes_are_found_before_anything_starts(option: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planned({}, **{option: value})


def test_address_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"in use.*--address 127"):
        claim_addresses(f"127.0.0.1:{taken.getsockname()[1]}")
    for wrong in ("nowhere", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match=r"--address: .*allowed: host:port, a port of 0 to 65535"):
            claim_addresses(wrong)


def test_metrics_are_not_shown_where_a_bootstrap_listens() -> None:
    first, second = claim_addresses("127.0.0.1:0", 2)
    with pytest.raises(ConfigError, match=f"^--metrics-address: {second} is one of the bootstrap's own addresses$"):
        plan_cluster({Role.PREFILL: 1, Role.DECODE: 1}, (first, second), {}, {}, metrics=second)


def test_addresses_in_a_row_are_claimed_together() -> None:
    assert len(set(claim_addresses("127.0.0.1:0", 3))) == 3
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^--metrics-address: .* on 2 ports from '127.0.0.1:{port - 1}' on"):
            claim_addresses(f"127.0.0.1:{port - 1}", 2, "--metrics-address")
