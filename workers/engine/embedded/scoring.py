"""Log-probs of given tokens, many sequences in one forward pass. Knows jobs and the model; no cache, no HTTP.

Input log-probs are those of the model itself (log_softmax of the untempered logits, float32), as SGLang reports them: a request's
temperature concerns sampled tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from workers.engine.embedded.jobs import ComputeFailed, Job
from workers.engine.embedded.model import CausalModel
from workers.engine.embedded.sampling import choose_tokens

FORWARD_TOKENS = 8192
"""Padded tokens of one forward pass, which bounds its memory; one longer sequence still goes alone."""

LOGIT_NUMBERS = 1 << 24
"""Logits held at once while scoring: 64 MiB of float32."""

_OVERFLOW = "the model or the adapter overflows"


def batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Split jobs into forward passes of at most FORWARD_TOKENS padded tokens, similar lengths together.

    A job that must be computed alone gets a pass of its own.
    """
    batch: list[Job] = []
    for job in sorted(jobs, key=lambda j: len(j.prompt)):
        full = (len(batch) + 1) * len(job.prompt) > FORWARD_TOKENS
        if batch and (full or job.alone or batch[-1].alone):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


@torch.inference_mode()
def score(model: CausalModel, jobs: Sequence[Job]) -> None:
    """Fill in the jobs' input log-probs, and finish those that want at most one new token. One forward pass."""
    model.hooks.activate(jobs[0].adapter)
    hidden = model.hidden([job.prompt for job in jobs])
    _score_inputs(model, jobs, hidden)
    # Asked for no new token, SGLang draws one all the same and tells its log-prob.
    sampling = [(row, job) for row, job in enumerate(jobs) if job.single_forward]
    if sampling:
        last = hidden[[row for row, _ in sampling], [len(job.prompt) - 1 for _, job in sampling]]
        sample_rows([job for _, job in sampling], model.logits(last))


def sample_rows(jobs: Sequence[Job], logits_R: torch.Tensor) -> list[bool]:
    """One token for each job from its row of logits; True where the job ends with it, or fails alone on bad numbers."""
    tokens, log_probs = choose_tokens(logits_R, [job.choice for job in jobs], [job.draws.next() for job in jobs])
    ended = []
    for job, token, log_prob in zip(jobs, tokens, log_probs, strict=True):
        if not math.isfinite(log_prob):
            job.error = ComputeFailed(f"log-prob of new token {len(job.output_ids)} is {log_prob}: {_OVERFLOW}")
        ended.append(job.take(token, log_prob) or job.error is not None)
    return ended


def _score_inputs(model: CausalModel, jobs: Sequence[Job], hidden: torch.Tensor) -> None:
    """Log-prob of input token i+1 from hidden state i, in pieces that bound the memory of the logits."""
    rows, columns, targets = [], [], []
    for row, job in enumerate(jobs):
        if job.score_from >= 0:
            span = range(job.score_from, len(job.prompt) - 1)
            rows += [row] * len(span)
            columns += list(span)
            targets += job.prompt[job.score_from + 1 :]
    step = max(1, LOGIT_NUMBERS // model.vocabulary)
    values: list[float] = []
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        logits = model.logits(hidden[rows[part], columns[part]])
        target = torch.tensor(targets[part], device=logits.device)
        values += (logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(dim=-1)).tolist()
    taken = iter(values)
    for job in jobs:
        if job.score_from >= 0:
            job.input_log_probs = [next(taken) for _ in range(job.score_from, len(job.prompt) - 1)]
            bad = sum(not math.isfinite(value) for value in job.input_log_probs)
            if bad:
                job.error = ComputeFailed(f"{bad} of {len(job.input_log_probs)} input log-probs are not finite: {_OVERFLOW}")
