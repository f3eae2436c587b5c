"""OPERATIONS: every operation of the fast engine, for tests, the compile gate and benchmarks. The engine imports the launchers themselves."""

from __future__ import annotations

from twinfer.kernels.attention.operation import ATTENTION
from twinfer.kernels.embedding.operation import EMBEDDING
from twinfer.kernels.experts.operation import COMBINE, DOWN, GATE_UP
from twinfer.kernels.gated_norm.operation import GATED_RMS_NORM
from twinfer.kernels.gdn_inputs.operation import GDN_INPUTS, WRITE_HISTORIES
from twinfer.kernels.matmul.operation import MATMUL
from twinfer.kernels.norm.operation import ADD_RMS_NORM, RMS_NORM
from twinfer.kernels.operation import Operation
from twinfer.kernels.output_gate.operation import OUTPUT_GATE
from twinfer.kernels.page_table.operation import UPDATE_PAGE_TABLE
from twinfer.kernels.rope.operation import QK_NORM_ROPE_WRITE
from twinfer.kernels.router.operation import GROUP, ROUTE
from twinfer.kernels.sampling.operation import LOGPROBS, SAMPLE
from twinfer.kernels.swiglu.operation import SWIGLU

OPERATIONS: tuple[Operation, ...] = (
    ATTENTION,
    EMBEDDING,
    GATED_RMS_NORM,
    GDN_INPUTS,
    WRITE_HISTORIES,
    ADD_RMS_NORM,
    RMS_NORM,
    OUTPUT_GATE,
    UPDATE_PAGE_TABLE,
    SWIGLU,
    QK_NORM_ROPE_WRITE,
    MATMUL,
    ROUTE,
    GROUP,
    GATE_UP,
    DOWN,
    COMBINE,
    SAMPLE,
    LOGPROBS,
)
