"""Kernels of invariant mode in C: built by this machine's compiler, in the threads that torch's own kernels use.

They are a faster way to the same bits, never another definition: who uses one has compared it with the definition, and
without a compiler everything runs as it would without this file.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Final

import torch

from tp.compiled_library import BuildError, build_library, cache_folder

SOURCE: Final = Path(__file__).with_suffix(".c")
_FLAGS = ("-shared", "-fPIC", "-O3", "-ffp-contract=off")
_CAPABILITIES: Final[Mapping[str, tuple[str, ...]]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
_RUNTIMES = ("libgomp", "libomp", "libiomp")
_MAPS = Path("/proc/self/maps")
_MOST_HEAD_DIM = 256
TILE_FIELDS: Final = 7
"""Of a tile of queries: first row, rows, first position, first block, blocks, place of its slots and of its weights."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


def build_kernels(environ: Mapping[str, str]) -> Path:
    """Returns the kernels' library, from the cache folder or built now.

    Args:
        environ: Says where the compiler and the cache folder are.

    Raises:
        BuildError: There is none for this machine.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() in {"x86_64", "AMD64"} and capability not in _CAPABILITIES:
        raise BuildError(f"needs AVX2, and torch says {capability}")
    return build_library(
        SOURCE, (*_FLAGS, *_CAPABILITIES.get(capability, ())), ("-lm",), cache_folder(environ), environ
    )


class PackedWeight:
    """A weight in the kernels' layout, widened as it is read.

    Attributes:
        data: [panels, in, width], float32 or bfloat16; the last panel ends in zeros.
        out_features: How many columns are real.

    Args:
        weight: [out, in], float32 or bfloat16.
        width: Output features of a panel.
    """

    def __init__(self, weight: torch.Tensor, width: int) -> None:
        self.out_features, features = weight.shape
        whole, rest = divmod(self.out_features, width)
        self.data = weight.new_zeros(whole + (rest > 0), features, width)
        self.data[:whole] = weight[: whole * width].view(whole, width, features).transpose(1, 2)
        if rest:
            self.data[whole, :, :rest] = weight[whole * width :].t()

    def first_panel(self) -> PackedWeight:
        """Returns the first columns of it."""
        panel = copy(self)
        panel.data = self.data[:1]
        panel.out_features = min(self.out_features, self.data.shape[2])
        return panel


class InvariantKernels:
    """The kernels, loaded into this process.

    Attributes:
        width: Output features of a panel of a packed weight.

    Args:
        path: The library.

    Raises:
        BuildError: It cannot be loaded, or torch's OpenMP threads are not to be found.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            threads = ctypes.CDLL(_openmp_runtime())
            functions = (threads.GOMP_parallel, threads.omp_get_thread_num, threads.omp_get_num_threads)
        except (OSError, AttributeError) as error:
            raise BuildError(f"cannot be loaded: {error}") from None
        library.lockstep_threads.argtypes = [_POINTER] * 3
        library.lockstep_threads(*(ctypes.cast(function, _POINTER) for function in functions))
        self.width: int = library.lockstep_width()
        self._lanes: int = library.lockstep_lanes()
        self._product = library.lockstep_product
        self._product.argtypes = [
            *(_POINTER, _COUNT, _COUNT, _POINTER, _POINTER, ctypes.c_int, _POINTER, _POINTER),
            *(_COUNT, _COUNT, _COUNT, _COUNT, _POINTER, ctypes.c_int),
        ]
        self._scores = library.lockstep_scores
        self._scores.argtypes = [
            *(_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _POINTER, ctypes.c_int),
            *(_COUNT, _COUNT, _COUNT, _COUNT, ctypes.c_double, _POINTER, ctypes.c_int),
        ]
        self._outputs = library.lockstep_outputs
        self._outputs.argtypes = [
            *(_POINTER, _COUNT, _POINTER, _POINTER, ctypes.c_int),
            *(_COUNT, _COUNT, _COUNT, _COUNT, _POINTER, _POINTER, ctypes.c_int),
        ]
        for function in (library.lockstep_threads, self._product, self._scores, self._outputs):
            function.restype = None

    def product(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        adds: torch.Tensor,
        subtrees: int,
        chunk: int,
    ) -> torch.Tensor:
        """Returns the sums of subtrees of units, a fresh [S, T, out] float32.

        Args:
            x: [T, in] float32.
            weight: Of ``in`` input features.
            bias: [out] float32, added to every subtree; or None.
            adds: [U] int32, by unit of the input, all of one length: how many sums to take after its product, each of
                the last two nodes; -1 - sums where that ends a subtree.
            subtrees: How many end.
            chunk: Of so many elements one chain of additions is.
        """
        x = x.contiguous()
        rows, features = x.shape
        y = x.new_empty(subtrees, rows, weight.out_features)
        scratch = x if rows == 1 else x.new_empty(x.shape)
        units = adds.shape[0]
        self._product(
            x.data_ptr(),
            features,
            rows,
            scratch.data_ptr(),
            weight.data.data_ptr(),
            weight.data.dtype == torch.bfloat16,
            None if bias is None else bias.data_ptr(),
            adds.data_ptr(),
            units,
            features // units,
            chunk,
            weight.out_features,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def attends(self, head_dim: int) -> bool:
        """Returns whether there is attention for heads of this size."""
        return head_dim % self._lanes == 0 and head_dim <= _MOST_HEAD_DIM

    def scores(
        self,
        tiles: torch.Tensor,
        slots: torch.Tensor,
        *,
        queries: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        window: int | None,
    ) -> None:
        """Writes scaled scores less each row's largest to ``weights``; -inf where a row sees nothing.

        Args:
            tiles: [N, 7] int64, see ``TILE_FIELDS``.
            slots: int64, by block of 64 keys.
            queries: [T, heads, head_dim] float32, the heads of a row side by side.
            keys: [slots of the pool, kv_heads, head_dim], float32 or bfloat16, contiguous.
            weights: Flat float32, in which each tile has [kv_heads, rows · group, blocks · 64].
            window: How many positions a token sees; None is all.
        """
        _, heads, head_dim = queries.shape
        kv_heads = keys.shape[1]
        self._scores(
            tiles.data_ptr(),
            tiles.shape[0],
            slots.data_ptr(),
            queries.data_ptr(),
            queries.stride(0),
            keys.data_ptr(),
            keys.dtype == torch.bfloat16,
            kv_heads,
            heads // kv_heads,
            head_dim,
            window or 0,
            head_dim**-0.5,
            weights.data_ptr(),
            torch.get_num_threads(),
        )

    def outputs(
        self,
        tiles: torch.Tensor,
        slots: torch.Tensor,
        *,
        values: torch.Tensor,
        weights: torch.Tensor,
        outputs: torch.Tensor,
        sum_lanes: int,
    ) -> None:
        """Writes the tiles' rows of ``outputs``: sums of weighted values, over sums of weights.

        Args:
            tiles: As ``scores`` took them.
            slots: Likewise.
            values: As its keys.
            weights: The exponentials of what it wrote.
            outputs: [T, heads, head_dim] float32, contiguous.
            sum_lanes: Elements of a register of torch's own sums.
        """
        _, heads, head_dim = outputs.shape
        kv_heads = values.shape[1]
        self._outputs(
            tiles.data_ptr(),
            tiles.shape[0],
            slots.data_ptr(),
            values.data_ptr(),
            values.dtype == torch.bfloat16,
            kv_heads,
            heads // kv_heads,
            head_dim,
            sum_lanes,
            weights.data_ptr(),
            outputs.data_ptr(),
            torch.get_num_threads(),
        )


def _openmp_runtime() -> str:
    """Returns the path of the OpenMP runtime whose threads torch's kernels use."""
    home = str(Path(torch.__file__).parent.parent)
    found: list[str] = []
    with _MAPS.open() as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if path.startswith("/") and path.rsplit("/", 1)[-1].startswith(_RUNTIMES):
                found.append(path)
    if not found:
        raise OSError("torch has no OpenMP runtime in this process")
    # Another library may have brought one of its own.
    return min(found, key=lambda path: not path.startswith(home))
