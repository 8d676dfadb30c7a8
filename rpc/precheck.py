"""Asks the bootstraps whether they would have a node, before it loads anything: a large model takes minutes.

Attach decides, when the node can serve. But what it may object to, from the join token to the page layout, is known
as soon as the model's configuration has been read. What is not known yet is left out.
"""

from __future__ import annotations

import logging

import grpc

from engine.core.errors import Unavailable
from engine.core.messages import Registration
from engine.core.model_store import ensure_prepared
from engine.core.node_config import NodeConfig
from engine.core.types import NodeIdentity, PoolMemory, Role
from kvrelay.v1.bootstrap_pb2_grpc import BootstrapStub
from rpc.errors import from_rpc_error
from rpc.node import rank_ids
from rpc.security import CHANNEL_OPTIONS, open_channel
from rpc.session import is_refusal, join_token
from rpc.wire import registration_to_wire

__all__ = ["may_attach"]

log = logging.getLogger("kvrelay.node")

ANSWER_TIMEOUT_S = 3.0


def may_attach(role: Role, config: NodeConfig, ranks: int) -> bool:
    """False, after a log line, when a bootstrap will not have the ranks of a process of this configuration.

    One that cannot be asked may be on its way: the node will dial for as long as it takes. Raises ModelRefused.
    """
    model = ensure_prepared(config.model, config.model_dir, log.info)
    layout = model.layout(config.page_size, config.page_dtype)
    wanted = [
        Registration(
            identity=NodeIdentity.new(node_id),
            role=role,
            model=model.name,
            layout=layout,
            memory=PoolMemory(base_address=0, page_bytes=layout.page_bytes, num_pages=1),
            agent_metadata=b"",
            max_context=1,
        )
        for node_id in rank_ids(config.name(role), ranks)
    ]
    for address in config.bootstrap:
        try:
            with open_channel(address, config.access.tls, None, CHANNEL_OPTIONS) as channel:
                for one in wanted:
                    BootstrapStub(channel).MayAttach(
                        registration_to_wire(one), timeout=ANSWER_TIMEOUT_S, metadata=join_token(config.access)
                    )
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if is_refusal(error):
                log.critical("refused by the bootstrap", extra={"address": address, "error": str(error)})
                return False
            if isinstance(error, Unavailable):  # as often when all is started together
                log.info("bootstrap not there yet", extra={"address": address})
            else:
                log.warning("bootstrap not asked", extra={"address": address, "error": str(error)})
    return True
