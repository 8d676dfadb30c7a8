"""KV pages on their way from one node's registered pool into another's, over NIXL.

Owns: the NIXL agent and what it knows of its peers, the posting and watching of writes, the notices that ride on
them, the counting of notices and checking of pages on the other side, and the record of pages that a write may still
reach.
Must not know: requests, tokens, schedulers, gRPC, protobuf. It knows pages, room keys and node identities.

A room's way through it:

    sending node                                              receiving node
    PageSender.open(room, peer, remote pages)                 PageReceiver.expect(room, pages)
    PageSender.send(room, first, pages) ─┐                        │
    PageSender.send(…, last=bytes) ──────┤                        │
      PageStreams: order, batches, window│                        │
      transfer thread: checksums if any, │                        │
          lease, post ───────────────────┼─ pages, then notice ──►│ RoomTally: every sequence number counts; checksums
      poll until terminal ◄──────────────┘                        ├─► RoomProgress
      └─► Sent, then WritesDone                                   └─► RoomComplete(last bytes), or RoomBroken
      after cancel or failure: Quiesced ─ (told by others) ─► PageReceiver.settle, FenceTable.quiesced: pages free

`layout` page pools as descriptors, `agent` the NIXL agent, `notice` what rides on a write, `page_stream` which write is
next (pure), `sender` and `receiver` the two threads, `fencing` pages that are not free yet (pure).
"""
