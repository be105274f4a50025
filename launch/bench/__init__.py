"""``lockstep bench``: what is measured, against whom, and how it is told."""
