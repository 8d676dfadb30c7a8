"""`kvrelay status`, `drain` and `health`: what operators ask of a running cluster."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.client import CALL_TIMEOUT_S, ROLES, Client, ClientConfig, named_error, open_channel
from cli.show import bytes_text, describe_error, printable, say, table, wide_table
from engine.core.access import ClientAccess, DialTls
from engine.core.config import add_arguments, load
from engine.core.errors import NotFound
from engine.core.messages import NodeStats
from kvrelay.v1 import admin_pb2, generation_pb2, types_pb2
from rpc.wire import stats_from_wire

__all__ = ["drain", "health", "node_state", "status"]

_REQUESTS = ("ungranted", "waiting", "running", "transferring", "retracted")
_CLEAR = "\x1b[H\x1b[J"
_POLL_S = 0.2


# ---- status ----


def status(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay status`."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--inspect", action="store_true", help="have every node check its own books; 1 if any is wrong")
    how.add_argument("--watch", action="store_true", help="show it again whenever it changes")
    parser.add_argument("--requests", action="store_true", help="list live requests too")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="with --watch: at least so often"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object; with --watch one a line")
    add_arguments(parser, ClientConfig)
    parser.set_defaults(run=_status)


def _status(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    healthy = True
    with Client.from_flags(flags, env) as client, client.errors():
        model = client.model()
        for listing in _listings(client, flags):
            requests = None
            if flags.requests:
                asked = client.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=CALL_TIMEOUT_S)
                requests = list(asked.requests)
            if flags.json:
                print(json.dumps(_status_json(model, listing, requests)), flush=True)
            else:
                start = _CLEAR if flags.watch and sys.stdout.isatty() else ""
                print(start + _status_text(client.address, model, listing, requests), flush=True)
            healthy = not any(node.problems for node in listing.nodes)
            if flags.inspect and healthy and not flags.json:
                print("books checked: no problems")
    return 0 if healthy else 1


def _listings(client: Client, flags: argparse.Namespace) -> Iterator[admin_pb2.ListNodesResponse]:
    if flags.watch:
        yield from client.admin.Watch(admin_pb2.WatchRequest(interval_seconds=flags.interval))
    else:
        yield client.admin.ListNodes(admin_pb2.ListNodesRequest(inspect=flags.inspect), timeout=CALL_TIMEOUT_S)


def node_state(node: admin_pb2.Node) -> str:
    """A word for what the node is doing."""
    return "draining" if node.stats.draining else "serving" if node.stats.serving else "not serving"


def _status_json(
    model: generation_pb2.GetModelResponse,
    listing: admin_pb2.ListNodesResponse,
    requests: list[admin_pb2.LiveRequest] | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": model.name,
        "max_context": model.max_context,
        "page_size": model.page_size,
        "live_requests": listing.live_requests,
        "queued_requests": listing.queued_requests,
        "nodes": [
            {
                "node_id": node.node_id,
                "incarnation": node.incarnation,
                "role": ROLES.get(node.role, ""),
                "state": node_state(node),
                "heartbeat_age": node.heartbeat_age,
                "problems": list(node.problems),
                "set_aside": list(node.set_aside),
                "stats": asdict(stats_from_wire(node.stats)),
            }
            for node in listing.nodes
        ],
    }
    if requests is not None:
        result["requests"] = [{f.name: getattr(one, f.name) for f in one.DESCRIPTOR.fields} for one in requests]
    return result


def _status_text(
    address: str,
    model: generation_pb2.GetModelResponse,
    listing: admin_pb2.ListNodesResponse,
    requests: list[admin_pb2.LiveRequest] | None,
) -> str:
    page = f"{model.page_size} tokens a page" if model.page_size else "no node yet"
    lines = [
        f"{model.name} at {address}: {model.max_context} tokens of context, {page}",
        f"requests: {listing.live_requests} live, {listing.queued_requests} of them waiting",
    ]
    if listing.nodes:
        lines += ["", _node_table(listing)]
    if requests:
        lines += ["", _request_table(requests)]
    lines += [f"{node.node_id}: {problem}" for node in listing.nodes for problem in node.problems]
    for node in listing.nodes:
        if node.set_aside and node.role == types_pb2.ROLE_PREFILL:  # both ends say it
            lines.append(f"{node.node_id}: transfers kept failing, not paired for now with {', '.join(node.set_aside)}")
    return "\n".join(lines)


_IDENTITY = ("node", "role", "state")
_ALWAYS = (*_IDENTITY, "pages", "free", "seen")
_NOTHING = {"0", "-", bytes_text(0)}


def _node_table(listing: admin_pb2.ListNodesResponse) -> str:
    """A row a node. Columns that hold nothing for any node are left out, but for those of `_ALWAYS`."""
    nodes = [_node_cells(node) for node in listing.nodes]
    shown = [name for name in nodes[0] if name in _ALWAYS or {cells[name] for cells in nodes} - _NOTHING]
    return wide_table([shown, *([cells[name] for name in shown] for cells in nodes)], left=len(_IDENTITY))


def _node_cells(node: admin_pb2.Node) -> dict[str, str]:
    """What the table says of a node, by column."""
    s = node.stats
    looked_up = s.cached_tokens_total + s.computed_tokens_total
    return {
        "node": node.node_id,
        "role": str(ROLES.get(node.role, "?")),
        "state": node_state(node),
        "pages": str(s.pages_total),
        **{name: str(getattr(s, f"pages_{name}")) for name in ("free", "cached", "held", "fenced")},
        **{f"host {name}": str(getattr(s, f"host_pages_{name}")) for name in ("free", "cached")},
        **{name: str(getattr(s, name)) for name in _REQUESTS},
        "room (tokens)": str(s.head_room) if node.role == types_pb2.ROLE_DECODE else "-",
        "tokens/s": f"{s.tokens_per_second:.0f}",
        "cache hits": f"{s.cached_tokens_total / looked_up:.0%}" if looked_up else "-",
        "host hits": f"{s.host_hit_tokens_total / looked_up:.0%}" if s.host_hit_tokens_total else "-",
        "relayed": bytes_text(s.relayed_bytes_total),
        "seen": f"{node.heartbeat_age:.1f} s",
    }


def _request_table(requests: list[admin_pb2.LiveRequest]) -> str:
    rows = [["request", "state", "prefill", "decode", "prompt", "output", "attempt", "age"]]
    for one in requests:
        numbers = [str(n) for n in (one.prompt_tokens, one.output_tokens, one.attempts)]
        where = [one.prefill_node or "-", one.decode_node or "-"]
        rows.append([printable(one.request_id), one.state, *where, *numbers, f"{one.age:.1f} s"])
    return table(rows, left=4)


# ---- drain ----


def drain(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay drain`."""
    parser.add_argument("node", metavar="NODE", help="as `kvrelay status` names it")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="leave after so long, done or not")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the node has left")
    add_arguments(parser, ClientConfig)
    parser.set_defaults(run=_drain)


def _drain(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    with Client.from_flags(flags, env) as client, client.errors():
        client.model()  # from here on it is a front door that answers
        listing = client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=CALL_TIMEOUT_S)
        incarnation = next((node.incarnation for node in listing.nodes if node.node_id == flags.node), None)
        if incarnation is None:
            names = ", ".join(node.node_id for node in listing.nodes) or "none"
            raise NotFound(f"no node {flags.node!r} is attached; attached: {names}")
        request = admin_pb2.DrainRequest(node_id=flags.node, deadline_seconds=flags.deadline)
        client.admin.Drain(request, timeout=CALL_TIMEOUT_S)
        if flags.no_wait:
            return 0
        said = ""
        for listing in client.admin.Watch(admin_pb2.WatchRequest()):
            node = next((node for node in listing.nodes if node.incarnation == incarnation), None)
            if node is None:
                say(f"{flags.node} has left")
                return 0
            if (line := f"{flags.node} {_left(stats_from_wire(node.stats))}") != said:
                say(line)
                said = line
    say(f"{client.address} stopped answering before {flags.node} had left")
    return 1


def _left(stats: NodeStats) -> str:
    counts = {name: getattr(stats, name) for name in _REQUESTS}
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return ("draining: " if stats.draining else "asked to drain: ") + (shown or "nothing left to do")


# ---- health ----


def health(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay health`."""
    parser.add_argument("address", metavar="ADDRESS", help="host:port of any KVRelay process")
    parser.add_argument("--service", default="", metavar="NAME", help="full name of a service; default: the process")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="ask again for so long")
    add_arguments(parser, DialTls)
    parser.set_defaults(run=_health)


def _health(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    until = time.monotonic() + flags.wait
    access = ClientAccess(tls=load(DialTls, file=None, env=env, flags=vars(flags)))
    with open_channel(flags.address, access) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            serving, answer = _check(stub, flags)
            if serving or time.monotonic() >= until:
                print(answer)
                return 0 if serving else 1
            time.sleep(_POLL_S)


def _check(stub: health_pb2_grpc.HealthStub, flags: argparse.Namespace) -> tuple[bool, str]:
    """Whether it serves, and the answer as a line."""
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=flags.service), timeout=5.0)
    except grpc.RpcError as error:
        named = named_error(error, flags.address)
        if isinstance(named, NotFound):  # grpc's own servicer says no more than the code
            named = NotFound(f"no service {flags.service!r} at {flags.address}")
        return False, describe_error(named)
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return answer.status == health_pb2.HealthCheckResponse.SERVING, word
