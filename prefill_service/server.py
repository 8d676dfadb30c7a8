"""The prefill process: options in, exit code out."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing

import uvloop

from engine.core.logs import setup_logging
from engine.core.messages import Registration
from engine.core.metrics import Metrics, NodeMetric, serve_metrics
from engine.core.types import NodeIdentity, Role
from engine.device.setup import set_up_device
from prefill_service.config import PrefillConfig
from prefill_service.loop import PrefillEngine
from rpc.node import run_node
from transfer.agent import TransferAgent

__all__ = ["main"]

log = logging.getLogger("kvrelay.node")


def main(config: PrefillConfig) -> int:
    """Serve until told to leave. Raises ConfigError when the node cannot start."""
    node = config.node
    identity = NodeIdentity.new(node.name(Role.PREFILL))
    setup_logging(node.logs, role=Role.PREFILL, node=identity.node_id)
    device = set_up_device(node)
    metrics = Metrics(NodeMetric)
    with ExitStack() as stack:
        endpoint = stack.enter_context(closing(serve_metrics(metrics, node.metrics_listen)))
        log.info("metrics", extra={"port": endpoint.port})
        agent = stack.enter_context(closing(TransferAgent(identity, device.memory)))
        engine = PrefillEngine(device, config, agent, metrics)
        registration = Registration(
            identity=identity,
            role=Role.PREFILL,
            model=device.model.name,
            layout=device.layout,
            memory=device.memory,
            agent_metadata=agent.metadata,
            max_context=device.max_context,
        )
        return uvloop.run(
            run_node(engine, registration, node, lambda stats: metrics.set_node(identity.node_id, Role.PREFILL, stats))
        )
