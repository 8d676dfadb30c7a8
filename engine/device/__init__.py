"""Tensors: the page pool, its allocator, the forward batch, the model runner and the sampler.

A request is not known here. Callers flatten requests into a `ForwardBatch`, get logits for the rows they asked
for, and sample from them. Importing this package imports nothing; each module imports torch for itself.
"""
