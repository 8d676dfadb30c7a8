"""The prefill process: options in, exit code out."""

from __future__ import annotations

from contextlib import ExitStack, closing

from engine.core.messages import Registration
from engine.core.metrics import Metrics
from engine.core.types import NodeIdentity, Role
from engine.device.setup import set_up_device
from prefill_service.config import PrefillConfig
from prefill_service.journal import PassLog
from prefill_service.loop import PrefillEngine
from rpc.node import serve_node
from transfer.agent import TransferAgent

__all__ = ["main"]


def main(config: PrefillConfig) -> int:
    """Serve until told to leave. Raises ConfigError when the node cannot start."""

    def build(identity: NodeIdentity, metrics: Metrics, stack: ExitStack) -> tuple[PrefillEngine, Registration]:
        path = config.scheduler.log_passes
        pass_log = None if path is None else stack.enter_context(closing(PassLog(path, identity.node_id)))
        device = set_up_device(config.node, host_kv_memory=config.scheduler.host_kv_memory)
        agent = stack.enter_context(closing(TransferAgent(identity, device.memory)))
        return PrefillEngine(device, config, agent, metrics, pass_log=pass_log), Registration(
            identity=identity,
            role=Role.PREFILL,
            model=device.model.name,
            layout=device.layout,
            memory=device.memory,
            agent_metadata=agent.metadata,
            max_context=device.max_context,
        )

    return serve_node(Role.PREFILL, config.node, build)
