"""Where cuBLAS may serve in place of the matmul kernel: where its bits were seen to equal the kernel's. A table of measurements, no heuristic.

Law 2 holds if every M gives a row the same bits. cuBLAS alone breaks it (it splits K at some M of some weights), so it may serve only a weight,
at an M, on a device, with a version of cuBLAS and of torch (which makes the call) and their settings, for which the comparison with the kernel found
no difference. Whatever is not in the table goes to the kernel: other devices, versions and shapes, float32, a bias, an `out` of another dtype.
An engine compares once more when it starts (`Products.checked`), at every M that its steps will have; any other M goes to the kernel too.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from twinfer.kernels.matmul.kernel import matmul


@dataclass(frozen=True, slots=True)
class Served:
    """M in first .. last: no difference was seen. `first` is also where cuBLAS begins to be the faster, if that is higher."""

    first: int
    last: int = 8192


@dataclass(frozen=True, slots=True)
class Stack:
    """What decides which kernel cuBLAS picks, apart from the shape."""

    device: str
    capability: tuple[int, int]
    cublas: str
    torch: str  # major.minor
    settings: str = "library cublas, workspace default, bf16 sums reduced True"  # torch's own


Weights = Mapping[tuple[int, int], Served]

# Found by bench/probes/matmul.py `compare_cublas` in bf16: 1 .. 512 every M; beyond, steps of 37 to 1023 and of 128 to 8192; for heads up to 1024.
# Differing sizes: bench/probes/RESULTS.md. `first` is the smallest timed M at which cuBLAS was the faster, of those above every differing one.
_H200: Weights = {
    # 0.6B: qkv, o, gate_up, down (lawful from 145), lm_head
    (4096, 1024): Served(256),
    (1024, 2048): Served(2048),
    (6144, 1024): Served(128),
    (1024, 3072): Served(2048),
    (151936, 1024): Served(128, 1024),
    # 4B: o is lawful from 81, down from 257
    (6144, 2560): Served(128),
    (2560, 4096): Served(128),
    (19456, 2560): Served(128),
    (2560, 9728): Served(257),
    (151936, 2560): Served(128, 1024),
    # 8B: o is lawful from 49, down from 337
    (6144, 4096): Served(128),
    (4096, 4096): Served(256),
    (24576, 4096): Served(128),
    (4096, 12288): Served(337),
    (151936, 4096): Served(128, 1024),
    # 32B: o is lawful from 161; down differs up to 512, where the comparison of every M ends, hence the distance
    (10240, 5120): Served(64),
    (5120, 8192): Served(161),
    (51200, 5120): Served(128),
    (5120, 25600): Served(1024),
    (151936, 5120): Served(128, 1024),
}
TABLE: Mapping[Stack, Weights] = {Stack("NVIDIA H200", (9, 0), "13.1.0.3", "2.11"): _H200}


def stack(device: torch.device) -> Stack | None:
    """The stack of a CUDA device; None on a CPU, or where cuBLAS is not the package that the table names versions of."""
    if device.type != "cuda":
        return None
    try:
        cublas = version("nvidia-cublas")
    except PackageNotFoundError:
        return None
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return Stack(name, capability, cublas, ".".join(torch.__version__.split(".")[:2]), settings())


def settings() -> str:
    """What torch is told that changes which kernel cuBLAS picks: its library, its workspace, and whether a split sum may be rounded to bf16 in between."""
    library = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default")
    first = bool(reduced[0] if isinstance(reduced, tuple) else reduced)
    return f"library {'cublas' if library == 'default' else library}, workspace {workspace}, bf16 sums reduced {first}"


def serves(on: Stack | None, dtype: torch.dtype, m: int, n: int, k: int) -> bool:
    """Whether cuBLAS, as far as the table knows, may multiply x [m, k] of `dtype` with a weight [n, k] on a stack, and is the faster."""
    if on is None or dtype != torch.bfloat16:
        return False
    served = TABLE.get(on, {}).get((n, k))
    return served is not None and served.first <= m <= served.last


class Products:
    """Products of activations with the weights of one engine: by cuBLAS where it may serve, else by the kernel."""

    def __init__(self, equal: Mapping[tuple[int, int], frozenset[int]], some: torch.Tensor) -> None:
        """equal: by shape [N, K] of a weight, the M at which cuBLAS may serve. some: a weight, for its dtype and device."""
        self._equal, self._dtype, self._device = equal, some.dtype, some.device
        self._thread = threading.local()

    @classmethod
    def checked(cls, weights: Iterable[torch.Tensor], sizes: Iterable[int]) -> Products:
        """Compares cuBLAS with the kernel for each shape among `weights`, at those M of `sizes` at which the table lets cuBLAS serve.

        Where any bit differs, or memory for the comparison is short, the kernel serves that shape at every M, with a warning. Takes temporary memory for
        the largest M and waits for the device.
        """
        shapes = {(weight.shape[0], weight.shape[1]): weight for weight in weights}
        sizes = sorted(set(sizes))
        on = stack(next(iter(shapes.values())).device)
        equal: dict[tuple[int, int], frozenset[int]] = {}
        for (n, k), weight in shapes.items():
            served = [m for m in sizes if serves(on, weight.dtype, m, n, k)]
            if not served:
                continue
            try:
                found = differing(weight, served)
            except torch.OutOfMemoryError:
                warnings.warn(f"too little memory to compare cuBLAS for a weight [{n}, {k}]: Triton serves it", stacklevel=2)
                continue
            if found:
                warnings.warn(f"cuBLAS gives other bits for a weight [{n}, {k}] at M = {found[0]} on {on}, where none was seen: Triton serves it", stacklevel=2)
                continue
            equal[n, k] = frozenset(served)
        return cls(equal, next(iter(shapes.values())))

    def enter_thread(self) -> None:
        """Multiplies a little in a thread that comes for the first time, on the current stream, so that no product of a step takes memory.

        torch keeps a handle of cuBLAS for each thread, and a workspace for each handle and stream that the first product takes from its allocator (32 MiB
        on Hopper): ATen/cuda/CublasHandlePool.cpp. An engine may be made in one thread and stepped in another.
        """
        if self._equal and not getattr(self._thread, "entered", False):
            some = torch.zeros(16, 16, dtype=self._dtype, device=self._device)
            torch.mm(some, some)
            self._thread.entered = True

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """The call of `plain.matmul`; all tensors contiguous."""
        if (
            bias is None
            and out.dtype == x.dtype
            and x.shape[0] in self._equal.get((weight.shape[0], weight.shape[1]), ())
            and not (x.data_ptr() | weight.data_ptr() | out.data_ptr()) % 16  # cuBLAS picks by alignment too; the comparison had aligned tensors
        ):
            torch.mm(x, weight.t(), out=out)
        else:
            matmul(x, weight, out, bias)


def differing(weight: torch.Tensor, sizes: Iterable[int], seed: int = 0) -> list[int]:
    """The M of `sizes` at which cuBLAS and the kernel differ in any bit for random x: what extends the table, or checks it at start-up.

    Allocates x and both results for the largest M, and waits for the device.
    """
    sizes = sorted(sizes)
    generator = torch.Generator(weight.device).manual_seed(seed)
    x = torch.randn(sizes[-1], weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    ours = torch.empty(sizes[-1], weight.shape[0], dtype=weight.dtype, device=weight.device)
    matmul(x, weight, ours)
    theirs = torch.empty_like(ours)
    found = []
    for m in sizes:
        torch.mm(x[:m], weight.t(), out=theirs[:m])
        if not torch.equal(theirs[:m], ours[:m]):
            found.append(m)
    return found
