"""The prefill node: reads prompts, keeps what it computed, and relays it page by page to decode nodes.

Owns: the prefix cache and who holds which page, the order of the waiting queue, what each forward computes, and the
sending of finished pages. Must not know: text, clients, other prefill nodes, or how a decode node decodes.

A request's way through it: `scheduler.submit` puts it in the bootstrap queue, where its cached prefix is kept fresh
until a decode node grants pages; then it competes in the waiting queue, which `policy` orders. In each pass `adder`
admits from the head as far as the budgets go; a prompt longer than a chunk becomes the continuation. After each
forward its whole pages go to `prefix_cache` and to the sender; after the last chunk it stays in the in-flight queue,
its pages locked, until every write from them is terminal.
"""
