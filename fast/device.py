"""Device: what the fast engine runs on, an NVIDIA GPU or Triton's interpreter on a CPU, and what differs between the two. It computes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton

from twinfer.config import ModelConfig
from twinfer.errors import AllocationError, ConfigError, LimitError
from twinfer.kernels.attention.tiles import HEAD_DIMS, Tile, decode_tile, padded_group, tile
from twinfer.kernels.embedding.kernel import embedding_kernel
from twinfer.kernels.gdn.tiles import HEAD_DIMS as GDN_HEAD_DIMS
from twinfer.kernels.gdn.tiles import CommitTile, LongTile, SingleTile, commit_tile, long_tile, single_tile
from twinfer.kernels.sampling.sampler import MAX_LOGPROBS
from twinfer.limits import Limits

COMPUTED = ("float32", "bfloat16", "float16")
# Triton's interpreter keeps the place in the grid of the program that runs in one spot for the whole process: launches of two threads disturb each other.
INTERPRETER = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """compiled: kernels run on a GPU; else in the interpreter, on a CPU.

    capability, multiprocessors   of the GPU; of an H200's where there is none, so that the interpreter takes the same forms
    """

    kind: str
    compiled: bool
    capability: tuple[int, int]
    multiprocessors: int
    dtype_name: str
    _stream: torch.cuda.Stream | None

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Device:
        """What `check` has passed."""
        name = str(dtype).removeprefix("torch.")
        if device.type != "cuda":
            return cls(device.type, False, (9, 0), 132, name, None)
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return cls(device.type, True, capability, properties.multi_processor_count, name, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def stream(self) -> AbstractContextManager[object]:
        """Makes the executor's stream current; on a CPU keeps other threads out of the interpreter."""
        return INTERPRETER if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Waits for everything queued on the GPU; nothing on a CPU."""
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)

    @contextmanager
    def allocating_nothing(self, what: str) -> Iterator[None]:
        """Raises AllocationError where memory of the GPU is taken inside, which no bound would count. On a CPU nothing is watched (tests/fast does)."""
        if self._stream is None:
            yield
            return
        before = _allocations(self._stream.device)
        yield
        after = _allocations(self._stream.device)
        if after != before:
            raise AllocationError(what, after[0] - before[0], after[1] - before[1])

    def record(self) -> torch.cuda.Event | None:
        """An event behind everything queued so far; None on a CPU, where nothing is queued."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def attention_tile(self, spread: bool, head_dim: int, group: int) -> Tile:
        """Attention's tile for long rows (spread: for rows whose splits are spread). Raises ConfigError where there is none, with the reason."""
        try:
            return self._small(tile(self.capability, spread, self.dtype_name, head_dim, group), group)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def decode_tile(self, head_dim: int, group: int, num_rows: int) -> Tile:
        """Attention's tile for `num_rows` rows of one token."""
        return self._small(decode_tile(self.capability, self.dtype_name, head_dim, group, num_rows), group)

    def gdn_tiles(self, key_dim: int, value_dim: int, num_singles: int) -> tuple[LongTile, SingleTile, CommitTile]:
        """Tiles of Gated DeltaNet's kernels, for a step of so many rows of one token. Raises ConfigError for head dims that have none."""
        capability, itemsize = (self.capability if self.compiled else None), getattr(torch, self.dtype_name).itemsize
        try:
            return (
                long_tile(capability, itemsize, key_dim, value_dim),
                single_tile(capability, itemsize, key_dim, value_dim, num_singles),
                commit_tile(capability, itemsize, key_dim, value_dim),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _small(self, found: Tile, group: int) -> Tile:
        """In the interpreter, as few rows as a group allows: its time is that of the tile, full or not."""
        return found if self.compiled else replace(found, rows=max(16, padded_group(group)))


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter: what TRITON_INTERPRET said when they were defined."""
    return not isinstance(embedding_kernel, triton.runtime.JITFunction)


def check(config: ModelConfig, kind: str, dtype: str) -> None:
    """Raises ConfigError, with the remedy, where kernels can't run a model, on a device of this kind or in this dtype."""
    if dtype not in COMPUTED:
        raise ConfigError(f"dtype = {dtype!r}: the fast engine computes in {', '.join(COMPUTED)}; the reference engine has {dtype}")
    if config.head_dim not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"head_dim = {config.head_dim}: the fast engine's kernels have {dims}; the reference engine has any (--backend reference)")
    if config.gdn is not None:
        for name in ("key_head_dim", "value_head_dim"):
            if getattr(config.gdn, name) not in GDN_HEAD_DIMS:
                dims = ", ".join(map(str, GDN_HEAD_DIMS))
                raise ConfigError(
                    f"linear_{name} = {getattr(config.gdn, name)}: the fast engine's kernels have {dims}; the reference engine has any (--backend reference)"
                )
    capability = _capability(kind)
    try:
        for spread in (False, True):
            tile(capability, spread, dtype, config.head_dim, config.num_heads // config.num_kv_heads)
    except ValueError as error:
        raise ConfigError(f"{error}; the reference engine runs it (twinfer.reference.Engine, --backend reference)") from None
    if kind == "cuda":
        if torch.version.hip:
            raise ConfigError(
                f"device = 'cuda': this torch drives an AMD GPU (HIP {torch.version.hip}), the fast engine needs an NVIDIA GPU; use --backend reference"
            )
        if interpreting():
            raise ConfigError("device = 'cuda': TRITON_INTERPRET is set, so kernels run in Triton's interpreter on a CPU; unset it, or use device cpu")
        return
    if not interpreting():
        raise ConfigError(
            f"device = {kind!r}: the fast engine needs an NVIDIA GPU; use the reference engine (twinfer.reference.Engine, --backend reference), or set "
            "TRITON_INTERPRET=1 and take float32 to run the kernels in Triton's interpreter, for tests of small models"
        )
    old = _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4)
    if old:
        raise ConfigError(
            f"numpy = {np.__version__}: the interpreter of triton {triton.__version__} does not work with numpy 2.4 and later; "
            "pip install 'numpy<2.4' or 'triton>=3.7' (GPUs are not concerned)"
        )
    if dtype == "bfloat16":
        raise ConfigError("dtype = 'bfloat16': Triton's interpreter computes in numpy, which has none; use --dtype float32 (or float16)")


def _allocations(device: torch.device) -> tuple[int, int]:
    """How many blocks, and how many bytes, the caching allocator has handed out so far."""
    stats = torch.cuda.memory_stats(device)
    return stats["allocation.all.allocated"], stats["allocated_bytes.all.allocated"]


def _capability(kind: str) -> tuple[int, int]:
    """The GPU's compute capability; an H200's where there is none to ask, which is told elsewhere."""
    try:
        return torch.cuda.get_device_capability() if kind == "cuda" else (9, 0)
    except (AssertionError, RuntimeError):
        return (9, 0)


def check_limits(limits: Limits) -> None:
    """Raises LimitError where a limit is beyond what a kernel has room for."""
    if limits.max_logprobs > MAX_LOGPROBS:
        raise LimitError(f"max_logprobs = {limits.max_logprobs}: must be at most {MAX_LOGPROBS} on the fast engine, the width of its scratch")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
