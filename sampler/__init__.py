"""Sampling from vocabulary slices: parameters, logits processing, support, draw."""
