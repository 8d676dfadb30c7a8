"""The decode node: sets pages aside, receives KV, writes answers. It matches no prefix and runs no prompt.

Owns its page pool, which pages belong to which room, and the batch of running requests. It must not know prompts
(only their length, and their ids where a penalty needs them), clients, or other decode nodes.

    Reserve ─► prealloc queue ─► admission: pages allocated ─► Grant
                                        │
    pages arrive, counted by the receiver; the last notice brings token 0
                                        │ every notice here
                                        ▼
               running batch ─► one token a step ─► Publish ─► finished: pages free
                        ▲             │ out of pages
                        └── parked ◄──┘ in host memory, or RoomFailed: through a prefill node again

A request that ends while pages may still arrive leaves its pages fenced until the writer has acknowledged that it is
done with them, or is gone.
"""
