"""Log-probs of chosen tokens from logits whose vocabulary is spread over tensor-parallel ranks. Knows no model.

The logits are overwritten by their softmax, which is all that the backward pass needs: one array of that size, not three.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _VocabularyLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: Any, ranks: int) -> torch.Tensor:
        highest = logits.max(dim=1).values
        if ranks > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        shifted = logits - highest[:, None]
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[1])
        column = torch.where(mine, local, 0)
        chosen = torch.where(mine, shifted.gather(1, column[:, None]).squeeze(1), 0.0)
        softmax = shifted.exp_()
        total = softmax.sum(dim=1)
        if ranks > 1:
            both = torch.stack([chosen, total])
            dist.all_reduce(both, dist.ReduceOp.SUM, group)
            chosen, total = both.unbind()
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, column, mine)
        return chosen - total.log()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        softmax, column, mine = ctx.saved_tensors
        by_logit = softmax * -gradient[:, None]
        by_logit.scatter_add_(1, column[:, None], torch.where(mine, gradient, 0.0)[:, None])
        return by_logit, None, None, None, None


def vocabulary_log_probs(logits: torch.Tensor, targets: torch.Tensor, first: int, group: Any, ranks: int) -> torch.Tensor:
    """log softmax over the whole vocabulary at the targets.

    Args:
        logits: float32 (tokens, vocabulary of this rank).
        targets: int64 (tokens), ids in the whole vocabulary.
        first: id of this rank's first logit.

    Returns:
        float32 (tokens), the same on every rank.
    """
    out: torch.Tensor = _VocabularyLogProbs.apply(logits, targets, first, group, ranks)  # type: ignore[no-untyped-call]
    return out
