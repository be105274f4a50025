"""What can be wrong with a fault run as such."""

from __future__ import annotations


class ChaosError(RuntimeError):
    """Faults could not be put to the test: what is tested does not run without them."""
