"""Prints as JSON what torch sees on this machine; ``doctor`` runs it as a process, since importing torch may fail."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    json.dump(
        {
            "torch": torch.__version__,
            "cuda_devices": devices,
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        sys.stdout,
    )
