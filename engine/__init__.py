"""What both node kinds are built from.

``engine.core`` is plain Python (types, config, errors, metrics, logs, the hand-off state table, page keys) and
imports no torch: the bootstrap service lives on it alone. ``engine.device`` owns tensors: the page pool, the page
allocator, the model runner and the sampler. Neither knows gRPC, protobuf, NIXL or a service.
"""
