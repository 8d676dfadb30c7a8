"""The bootstrap service: the front door of clients, the registry of nodes, and the queue between them.

Owns: text (tokenizer, chat template, detokenization, stop strings), the view of the nodes, routing, the bootstrap
queue, and each request's attempts, order of tokens, deadlines and errors. Nodes own pages and caches; this service
only keeps what they say of them, and needs no store. It must not know torch, NIXL, transformers, or what a page holds.

A request's way through it:

    Generate ─► servicers.generation   checked, tokenized
                 └► front.submit       taken in, or refused with a reason
                      └► attempts      Submit to the prefill node that routing chooses; wait in `queue`
                           ├► Reserve  to the decode node with most head-room, once one has room
                           └► Granted  to the prefill node, when the decode node has answered
    Publish ──► servicers.nodes
                 └► front.on_output    tokens of both nodes
                      └► merge         every index once, in order
    stream ◄── servicers.generation
                 └► answer             detokenized, searched for stop strings, sent as deltas

A cluster of unified nodes knows neither Reserve nor Granted: both halves of an attempt are one node.

A failed attempt (`RoomFailed`, a lost node, a phase too slow) is closed with `Abort` to both nodes and followed by
another, with a new room, of the prompt and the tokens so far: `outcomes` decides whether, `failures` names the error.
`fences` sees to it that pages a lost writer may still write to come free, `pairs` that two nodes between which
transfers keep failing are not put together. What raises for one request ends that one, INTERNAL, and nothing else.
`front` and everything it calls is synchronous and takes its time from a clock; `servicers` and `server` are the shell
of sockets and tasks round it.

Generate may begin behind tokens that another front door has delivered (`resumed`): the first attempt then is what a
retry is, and the answer's text begins where that of those tokens ended.

Health (grpc.health.v1): "", kvrelay.v1.Bootstrap and kvrelay.v1.Admin are SERVING while the process listens, since
nodes and operators wait for that (liveness). kvrelay.v1.Generation is SERVING while at least one prefill and one
decode node serve, or a unified one (readiness). At shutdown all turn NOT_SERVING before live requests are waited for.
"""
