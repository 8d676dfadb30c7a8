"""The decode process: options in, exit code out."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing

import uvloop

from decode_service.config import DecodeConfig
from decode_service.loop import DecodeEngine
from engine.core.logs import setup_logging
from engine.core.messages import Registration
from engine.core.metrics import Metrics, NodeMetric, serve_metrics
from engine.core.types import NodeIdentity, Role
from engine.device.setup import set_up_device
from rpc.node import run_node
from transfer.agent import TransferAgent

__all__ = ["main"]

log = logging.getLogger("kvrelay.node")


def main(config: DecodeConfig) -> int:
    """Serve until told to leave. Raises ConfigError when the node cannot start."""
    node = config.node
    identity = NodeIdentity.new(node.name(Role.DECODE))
    setup_logging(node.logs, role=Role.DECODE, node=identity.node_id)
    device = set_up_device(node)
    metrics = Metrics(NodeMetric)
    with ExitStack() as stack:
        endpoint = stack.enter_context(closing(serve_metrics(metrics, node.metrics_listen)))
        log.info("metrics", extra={"port": endpoint.port})
        agent = stack.enter_context(closing(TransferAgent(identity, device.memory)))
        engine = DecodeEngine(device, config, agent, metrics)
        registration = Registration(
            identity=identity,
            role=Role.DECODE,
            model=device.model.name,
            layout=device.layout,
            memory=device.memory,
            agent_metadata=agent.metadata,
            max_context=device.max_context,
            reserved_decode_tokens=config.decode.reserved_decode_tokens,
            max_running=config.decode.max_running,
        )
        return uvloop.run(
            run_node(engine, registration, node, lambda stats: metrics.set_node(identity.node_id, Role.DECODE, stats))
        )
