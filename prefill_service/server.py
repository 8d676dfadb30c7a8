"""The prefill process: options in, exit code out."""

from __future__ import annotations

from contextlib import ExitStack, closing

from engine.core.messages import Registration
from engine.core.metrics import Metrics
from engine.core.types import NodeIdentity, Role
from engine.device.setup import set_up_ranks
from prefill_service.config import PrefillConfig
from prefill_service.delayer import Delayer
from prefill_service.journal import PassLog
from prefill_service.loop import PrefillEngine
from prefill_service.ranks import Ranks
from rpc.node import serve_node
from transfer.agent import TransferAgent

__all__ = ["main"]


def main(config: PrefillConfig) -> int:
    """Serve until told to leave. Raises ConfigError when the node cannot start."""
    size = config.ranks.dp_size
    devices = set_up_ranks(config.node, size, host_kv_memory=config.scheduler.host_kv_memory)
    delayer = Delayer(config.ranks, config.scheduler.ttft_target)
    ranks = Ranks(delayer, config.ranks.delay_max_running) if size > 1 else None

    def build(identity: NodeIdentity, metrics: Metrics, stack: ExitStack) -> tuple[PrefillEngine, Registration]:
        path = config.scheduler.log_passes
        pass_log = None if path is None else stack.enter_context(closing(PassLog(path, identity.node_id)))
        device = next(devices)
        agent = stack.enter_context(closing(TransferAgent(identity, device.memory)))
        return PrefillEngine(device, config, agent, metrics, pass_log=pass_log, ranks=ranks), Registration(
            identity=identity,
            role=Role.PREFILL,
            model=device.model.name,
            layout=device.layout,
            memory=device.memory,
            agent_metadata=agent.metadata,
            max_context=device.max_context,
            host_pages=device.host_pages,
        )

    return serve_node(Role.PREFILL, config.node, build, size)
