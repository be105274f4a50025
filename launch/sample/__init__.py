"""``lockstep sample``: one sampling step from logits in a file."""
