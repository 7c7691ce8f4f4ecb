"""The optimizer step that every back-end takes: torch's own Adam over named parameters, moments held by key.

One function, so that two back-ends cannot differ in it. Knows no model and no parallelism: Adam works on each value alone, so a
shard of a parameter takes the step that the whole would take.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workflows.contracts.request import OptimizerSettings

Moments = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""(first, second) moments of each parameter by key; empty before the first step."""


def adam_step(
    parameters: Mapping[str, torch.nn.Parameter], moments: Moments, steps_taken: int, optimizer: OptimizerSettings
) -> Moments:
    """Step every parameter by its `.grad`, which is dropped. Returns the new moments. Source: spec algorithm 2.4.

    A parameter without a gradient had no signal at all: it gets a zero gradient, since Adam's moments decay all the same.
    """
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    adam = torch.optim.Adam(
        list(parameters.values()),
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=0.0,
        foreach=False,
    )
    for key, (exp_avg, exp_avg_sq) in moments.items():
        step = torch.tensor(float(steps_taken))
        adam.state[parameters[key]] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    adam.step()
    for parameter in parameters.values():
        parameter.grad = None
    return {key: (adam.state[p]["exp_avg"].detach(), adam.state[p]["exp_avg_sq"].detach()) for key, p in parameters.items()}
