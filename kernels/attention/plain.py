"""Paged attention in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch

from twinfer.kernels.attention.tiles import Tile


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    row_indptr: torch.Tensor,
    context: torch.Tensor,
    tasks: torch.Tensor,
    num_tasks: torch.Tensor,
    partial_acc: torch.Tensor,
    partial_m: torch.Tensor,
    partial_den: torch.Tensor,
    arrived: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    spread: bool,
    tile: Tile,
    num_programs: int,
) -> None:
    """out[t] = softmax(scale q[t] keys^T) values, over the keys that token t sees: its own position and those before, the last `window` of them if > 0.

    q, out       [T, H, d]; query head i reads kv head i // (H / K)
    keys, values [pages, page_size, K, d], any strides with the last dim contiguous; written before the call, for this step's tokens too
    page_table   [slots, width] int32: the pages of a request in order; behind a window, any pages
    slots        [R] int32: a row's line in page_table
    row_indptr   [R + 1] int32: row i has the tokens row_indptr[i] .. row_indptr[i + 1] - 1
    context      [R] int32: keys that the row's last token sees without a window, start + length
    tasks        [max_tasks, 4] int32, the first num_tasks[0] of them from `tasks.plan_tasks`: row, first token within the row, split, first place of the
                 tile's partials. A row in no task is left as it is
    partial_acc  [places, H, d] float32, partial_m and partial_den [places, H] float32: workspace of the SPREAD schedule
    arrived      [places, K] int32: zeros, and zeros again after the call

    spread, tile, num_programs: the schedule. The result does not depend on it, nor on partials, arrived or the split of a task: unused here.
    """
    page_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    for row in sorted(set(tasks[: int(num_tasks[0]), 0].tolist())):
        begin, end, seen = int(row_indptr[row]), int(row_indptr[row + 1]), int(context[row])
        pages = page_table[int(slots[row]), : -(-seen // page_size)].long()  # [pages of the row]
        k = keys[pages].flatten(0, 1)[:seen].repeat_interleave(group, 1)  # [seen, H, d]
        v = values[pages].flatten(0, 1)[:seen].repeat_interleave(group, 1)  # [seen, H, d]
        at = torch.arange(seen, device=q.device)  # [seen] positions of the keys
        own = torch.arange(seen - (end - begin), seen, device=q.device)  # [L] positions of the queries
        sees = at <= own[:, None]  # [L, seen]
        if window:
            sees &= at > own[:, None] - window
        used = sees.any(0)[:, None, None]  # what nobody sees may hold anything
        k, v = torch.where(used, k, 0), torch.where(used, v, 0)
        s = torch.einsum("lhd,shd->hls", q[begin:end].to(wide), k.to(wide)) * scale  # [H, L, seen]
        p = s.masked_fill(~sees, float("-inf")).softmax(-1)  # [H, L, seen]
        # The weights are rounded as the kernel's and PyTorch's own attention round them: to the values' dtype, before the product.
        out[begin:end] = torch.einsum("hls,shd->lhd", p.to(v.dtype).to(wide), v.to(wide)).to(out.dtype)  # [L, H, d]
