"""The compiled kernels of invariant mode, where this machine has a compiler."""

from __future__ import annotations

import os

import torch

from tp.compiled_library import BuildError
from tp.invariant_kernels import InvariantKernels, build_kernels
from tp.invariant_products import InvariantProductFactory
from tp.product_measure import onednn_supports


def invariant_factory(device: torch.device, *, compiled: bool = True) -> InvariantProductFactory:
    """Returns a rank's products: by compiled kernels, as in a run, or as where there is no compiler."""
    kernels = None
    if compiled and device.type == "cpu":
        try:
            kernels = InvariantKernels(build_kernels(os.environ))
        except BuildError:
            kernels = None
    return InvariantProductFactory(device, onednn=onednn_supports(torch.float32), kernels=kernels)
