"""The decode process: options in, exit code out."""

from __future__ import annotations

from contextlib import ExitStack, closing

from decode_service.config import DecodeConfig, check_pool
from decode_service.loop import DecodeEngine
from engine.core.messages import Registration
from engine.core.metrics import Metrics
from engine.core.types import NodeIdentity, Role
from engine.device.setup import set_up_device
from rpc.node import serve_node
from transfer.agent import TransferAgent

__all__ = ["main"]


def main(config: DecodeConfig) -> int:
    """Serve until told to leave. Raises ConfigError when the node cannot start."""

    def build(identity: NodeIdentity, metrics: Metrics, stack: ExitStack) -> tuple[DecodeEngine, Registration]:
        device = set_up_device(config.node, host_kv_memory=config.decode.host_kv_memory, host_untouched=True)
        check_pool(config.decode, device.pool.num_pages, device.layout.page_size)
        agent = stack.enter_context(closing(TransferAgent(identity, device.memory)))
        return DecodeEngine(device, config, agent, metrics), Registration(
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

    return serve_node(Role.DECODE, config.node, build)
