"""The unified node: reads prompts and writes answers in one loop, on one pool, and hands nothing over.

It is what disaggregation is compared with, so it is made of the same parts: policy, adder, scheduler and prefix cache
of `prefill_service`, the runner and the sampler of `engine.device`. It owns the batch of requests that decode and how
much each is expected to grow. Must not know: text, clients, other nodes, or anything of transfers.

    Submit ─► waiting queue ─► pass: who is prefilled, how far ─┐
                  ▲                                             ├─► one forward for both ─► a token each, one Publish
                  └── retracted, preempted ◄── decoding ◄───────┘
                                                  └─► finished: its whole pages stay cached, for the next turn

Each turn every decoding request gets the page its next token needs, and the rest of memory is for prompts. When memory
is too short for that, requests are retracted: they wait again, with prompt and answer so far as their prompt.
"""
