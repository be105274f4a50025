"""Faults in a user's own torch.distributed script, under real torchrun."""
