"""Asks the bootstraps whether they would have a node, before it loads anything: a large model takes minutes.

Attach decides, when the node can serve. But what it may object to, from the join token to the page layout, is known
as soon as the model's configuration has been read. What is not known yet is left out.
"""

from __future__ import annotations

import logging

import grpc

from engine.core.messages import Registration
from engine.core.model_store import ensure_prepared
from engine.core.node_config import NodeConfig
from engine.core.types import NodeIdentity, PageLayout, PoolMemory, Role
from kvrelay.v1.bootstrap_pb2_grpc import BootstrapStub
from rpc.errors import from_rpc_error
from rpc.security import CHANNEL_OPTIONS, open_channel
from rpc.session import is_refusal, join_token
from rpc.wire import registration_to_wire

__all__ = ["may_attach"]

log = logging.getLogger("kvrelay.node")

ANSWER_TIMEOUT_S = 3.0


def may_attach(role: Role, config: NodeConfig) -> bool:
    """False, after a log line, when a bootstrap will not have a node of this configuration. Raises ModelRefused.

    One that cannot be asked may be on its way: the node will dial for as long as it takes.
    """
    model = ensure_prepared(config.model, config.model_dir, log.info)
    dtype = config.kv_dtype or config.dtype
    layout = PageLayout(config.page_size, model.layers, model.kv_heads, model.head_dim, dtype, model.fingerprint)
    registration = Registration(
        identity=NodeIdentity.new(config.name(role)),
        role=role,
        model=model.name,
        layout=layout,
        memory=PoolMemory(base_address=0, page_bytes=layout.page_bytes, num_pages=1),
        agent_metadata=b"",
        max_context=1,
    )
    for address in config.bootstrap:
        with open_channel(address, config.access.tls, None, CHANNEL_OPTIONS) as channel:
            try:
                BootstrapStub(channel).MayAttach(
                    registration_to_wire(registration), timeout=ANSWER_TIMEOUT_S, metadata=join_token(config.access)
                )
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if is_refusal(error):
                    log.critical("refused by the bootstrap", extra={"address": address, "error": str(error)})
                    return False
                log.info("no bootstrap yet", extra={"address": address, "error": str(error)})
    return True
