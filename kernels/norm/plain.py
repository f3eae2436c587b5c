"""RMS norm in plain PyTorch. Not used by the engine: it says what the kernels compute."""

from __future__ import annotations

import torch


def _normed(u: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
    """weight * round(u / root mean square of u): computed in float32 (float64 for float64), rounded to u's dtype, then multiplied in that dtype.

    centred  by 1 + weight instead, all of it wide and rounded once: the norms of the hybrid types (model specification, 3.1)
    """
    wide = u.to(torch.float64 if u.dtype == torch.float64 else torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.to(wide.dtype))).to(u.dtype) if centred else weight * wide.to(u.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, centred: bool = False) -> None:
    """out[t] = weight * x[t] / root mean square of x[t]; centred: 1 + weight in its place.

    x       [T, h]
    weight  [h], x's dtype
    out     [T, h], x's dtype; may be x itself
    """
    out.copy_(_normed(x, weight, eps, centred))


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, centred: bool = False) -> None:
    """residual <- residual + x, rounded to its dtype; then out = rms_norm of the new residual.

    x         [T, h], what the layer's attention or MLP adds
    residual  [T, h], read and written, x's dtype
    weight    [h], x's dtype
    out       [T, h], x's dtype; may be x itself
    """
    residual.add_(x)
    out.copy_(_normed(residual, weight, eps, centred))
