"""Attention on a block of queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distfx.runtime.kernels.empty import ZeroResult

__all__ = ["causal_attention"]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, start: int, scale: float | None = None, gqa: bool = False
) -> Tensor:
    """Causal attention of the queries ``start, start + 1, ...``: query i attends to the keys up to i."""
    if q.numel() == 0:
        return ZeroResult((*q.shape[:-1], v.shape[-1]), product=True)(q, k, v)
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril_(start)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)
