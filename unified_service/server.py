"""The unified process: options in, exit code out."""

from __future__ import annotations

from contextlib import ExitStack, closing

from engine.core.messages import Registration
from engine.core.metrics import Metrics
from engine.core.types import NodeIdentity, Role
from engine.device.setup import set_up_device
from prefill_service.journal import PassLog
from rpc.node import serve_node
from unified_service.config import UnifiedConfig
from unified_service.loop import UnifiedEngine

__all__ = ["main"]


def main(config: UnifiedConfig) -> int:
    """Serve until told to leave. Raises ConfigError when the node cannot start."""

    def build(identity: NodeIdentity, metrics: Metrics, stack: ExitStack) -> tuple[UnifiedEngine, Registration]:
        path = config.scheduler.log_passes
        pass_log = None if path is None else stack.enter_context(closing(PassLog(path, identity.node_id)))
        device = set_up_device(config.node, host_kv_memory=config.scheduler.host_kv_memory)
        return UnifiedEngine(device, config, metrics, pass_log=pass_log), Registration(
            identity=identity,
            role=Role.UNIFIED,
            model=device.model.name,
            layout=device.layout,
            memory=device.memory,
            agent_metadata=b"",
            max_context=device.max_context,
            host_pages=device.host_pages,
        )

    return serve_node(Role.UNIFIED, config.node, build)
