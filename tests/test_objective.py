"""The objective: golden KL shaping, exact gradients against autograd and finite differences, masks and constant groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activities.train.objective import choose_groups, loss_gradient, shape, token_kl

CASES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "golden" / "advantages_kl_shaping.json").read_text()
)


def arrays(case: dict[str, Any], field: str) -> list[np.ndarray]:
    return [np.array(s[field], dtype=np.float64) for s in case["sequences"]]


def shaped(case: dict[str, Any]) -> tuple[float, list[np.ndarray]]:
    masks = arrays(case, "mask")
    kl = token_kl(arrays(case, "rollout_logprobs"), arrays(case, "base_logprobs"), masks)
    advantages = [
        # the golden files give the trajectory's advantage once per token
        shape(float(a[0]), d, m, kl.mean, case["kl_coef"])
        for a, d, m in zip(arrays(case, "advantages_in"), kl.difference, masks, strict=True)
    ]
    return kl.mean, advantages


@pytest.mark.parametrize("name", CASES)
def test_kl_shaping_golden(name: str) -> None:
    mean, advantages = shaped(CASES[name])
    assert mean == pytest.approx(CASES[name]["nanodiscover_float64"]["kl_policy_base"], rel=1e-9, abs=1e-12)
    for found, target in zip(advantages, CASES[name]["nanodiscover_float64"]["advantages_out"], strict=True):
        np.testing.assert_allclose(found, target, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("variant", "probe"), [("ratio_1_masked", 0.0), ("probe_0.1_masked", 0.1)])
def test_loss_and_gradient_golden(name: str, variant: str, probe: float) -> None:
    case = CASES[name]
    target = case["is_loss_closed_form_float64"][variant]
    _, advantages = shaped(case)
    loss = 0.0
    for i, (rollout, mask) in enumerate(zip(arrays(case, "rollout_logprobs"), arrays(case, "mask"), strict=True)):
        sign = np.where(np.arange(rollout.size) % 2 == 0, 1.0, -1.0)
        found = loss_gradient(rollout + probe * sign, rollout, advantages[i], mask)
        loss += found.loss
        np.testing.assert_allclose(found.gradient, target["grad"][i], rtol=1e-9, atol=1e-12)
    assert loss == pytest.approx(target["loss_sum"], rel=1e-9, abs=1e-12)


def random_case(seed: int, size: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, size)
    mask = (rng.random(size) > 0.3).astype(np.float64)
    return rollout + 0.2 * rng.standard_normal(size), np.where(mask > 0, rollout, 0.0), rng.standard_normal(size), mask


@pytest.mark.parametrize("seed", range(5))
def test_gradient_equals_autograd(seed: int) -> None:
    log_probs, rollout, advantages, mask = random_case(seed)
    variable = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    ratio = torch.exp(variable - torch.tensor(rollout))
    loss = -(ratio * torch.tensor(advantages) * torch.tensor(mask)).sum()
    loss.backward()
    found = loss_gradient(log_probs, rollout, advantages, mask)
    assert variable.grad is not None
    np.testing.assert_allclose(found.gradient, variable.grad.numpy(), rtol=1e-12, atol=1e-14)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)


def test_gradient_equals_finite_differences() -> None:
    log_probs, rollout, advantages, mask = random_case(7, size=12)
    found = loss_gradient(log_probs, rollout, advantages, mask).gradient
    step = 1e-6
    for t in range(log_probs.size):
        nudge = np.zeros_like(log_probs)
        nudge[t] = step
        up = loss_gradient(log_probs + nudge, rollout, advantages, mask).loss
        down = loss_gradient(log_probs - nudge, rollout, advantages, mask).loss
        assert found[t] == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-8)


def test_forced_tokens_change_nothing() -> None:
    log_probs, rollout, advantages, mask = random_case(3)
    before = loss_gradient(log_probs, rollout, advantages, mask)
    other = np.where(mask > 0, log_probs, -50.0)
    after = loss_gradient(other, rollout, np.where(mask > 0, advantages, 1e6), mask)
    assert after.loss == before.loss
    np.testing.assert_array_equal(after.gradient, before.gradient)
    assert (after.ratio[mask == 0] == 1).all()


def test_shaping_sums_to_zero_over_the_batch() -> None:
    rng = np.random.default_rng(1)
    masks = [(rng.random(n) > 0.2).astype(np.float64) for n in (3, 50, 17)]
    rollout = [rng.standard_normal(m.size) for m in masks]
    base = [rng.standard_normal(m.size) for m in masks]
    kl = token_kl(rollout, base, masks)
    total = sum(shape(0.0, d, m, kl.mean, 0.1).sum() for d, m in zip(kl.difference, masks, strict=True))
    assert total == pytest.approx(0.0, abs=1e-12)


def test_constant_groups_are_told_apart_exactly() -> None:
    tiny = 1.0 + 2**-52
    choice = choose_groups([[1.0, 1.0, 1.0], [1.0, 1.0, tiny], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    assert choice.kept == (1, 3)
    assert (choice.constant, choice.collapsed) == (2, False)


def test_one_group_stays_when_all_are_constant() -> None:
    choice = choose_groups([[0.0, 0.0], [3.0, 3.0]])
    assert choice.kept == (0,)
    assert (choice.constant, choice.collapsed) == (2, True)


def test_no_sampled_token_gives_no_kl() -> None:
    kl = token_kl([np.zeros(2)], [np.ones(2)], [np.zeros(2)])
    assert kl.mean == 0.0
