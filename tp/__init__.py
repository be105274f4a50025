"""Tensor parallelism: groups, partitions of a model's axes, and the layers that use them."""
