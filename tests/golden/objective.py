"""Replays advantages and KL shaping. Source: spec algorithm 2 and 10: float64 references are the target."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from activities.errors import InputError
from activities.train.advantages import group_advantages
from activities.train.objective import loss_gradient, shape, token_kl
from tests.golden.outcome import Case, number

Floats = NDArray[np.float64]

FLOAT32_RELATIVE = 1e-5
FLOAT32_STEP = 2.0**-23
PROBE = 0.1
"""By how much the probed log-probs differ from the rollout's, with alternating sign."""


def replay_adaptive(record: dict[str, Any]) -> Case:
    """Adaptive advantages of one reward group."""
    case = Case(record["name"])
    rewards = np.array([number(r) for r in record["rewards"]])
    try:
        found = group_advantages(rewards)
    except InputError as error:
        case.differ("advantages", str(error), "two_rollouts" if rewards.size == 2 else "")
        return case
    target = record["reef_float64"]
    case.near("beta", float(found.beta or 0.0), target["beta"])
    _near_all(case, "advantages", found.advantages, target["advantages"], 1e-9, 1e-11)
    tolerance = _float32_tolerance(rewards, float(found.beta or 0.0))
    if tolerance is None:
        case.differ("advantages of original_float32", "not comparable", "float32")
    else:
        # What is rounded is the weight ratio, which is the advantage plus one.
        expected = [number(value) + 1 for value in record["original_float32"]["advantages"]]
        _near_all(case, "original_float32 + 1", found.advantages + 1, expected, tolerance, 1e-6)
    return case


def replay_baselines(record: dict[str, Any]) -> Case:
    """Mean baseline and constant β = 2 of one reward group; the references are float32."""
    case = Case(record["name"])
    rewards = np.array([number(r) for r in record["rewards"]])
    rounding = 4 * FLOAT32_STEP * max(1.0, float(np.abs(rewards).max()))
    _near_all(case, "mean_baseline", group_advantages(rewards, "mean_baseline").advantages, record["mean_baseline"], 1e-5, rounding)
    entropic = group_advantages(rewards, "entropic", beta=2.0).advantages
    # A large advantage is a quotient by a float32 difference of nearly equal sums.
    _near_all(case, "entropic_beta2", entropic, record["entropic_beta2"], 10 * FLOAT32_RELATIVE, 4 * rounding)
    return case


def replay_shaping(name: str, record: dict[str, Any]) -> Case:
    """KL shaping of one batch, then the closed form of loss and gradient."""
    case = Case(name)
    rollout, base, masks = (_arrays(record, key) for key in ("rollout_logprobs", "base_logprobs", "mask"))
    kl = token_kl(rollout, base, masks)
    case.near("kl_policy_base", kl.mean, record["nanodiscover_float64"]["kl_policy_base"], absolute=1e-12)
    shaped = [
        shape(float(a[0]), d, m, kl.mean, record["kl_coef"]) if a.size else a
        for a, d, m in zip(_arrays(record, "advantages_in"), kl.difference, masks, strict=True)
    ]
    for i, (found, target) in enumerate(zip(shaped, record["nanodiscover_float64"]["advantages_out"], strict=True)):
        _near_all(case, f"advantages of sequence {i}", found, target, 1e-9, 1e-12)
    for variant, probe in (("ratio_1_masked", 0.0), ("probe_0.1_masked", PROBE)):
        _compare_loss(case, variant, record["is_loss_closed_form_float64"][variant], probe, (rollout, shaped, masks))
    return case


def _compare_loss(
    case: Case, variant: str, target: dict[str, Any], probe: float, batch: tuple[list[Floats], list[Floats], list[Floats]]
) -> None:
    loss = 0.0
    for i, (rollout, advantages, mask) in enumerate(zip(*batch, strict=True)):
        sign = np.where(np.arange(rollout.size) % 2 == 0, 1.0, -1.0)
        found = loss_gradient(rollout + probe * sign, rollout, advantages, mask)
        loss += found.loss
        _near_all(case, f"{variant} gradient of sequence {i}", found.gradient, target["grad"][i], 1e-9, 1e-12)
    case.near(f"{variant} loss", loss, target["loss_sum"], absolute=1e-12)


def _float32_tolerance(rewards: Floats, beta: float) -> float | None:
    """Relative tolerance that the rounding of rewards to float32 asks for, times four; None where it leaves nothing to compare."""
    tolerance = max(FLOAT32_RELATIVE, 4 * beta * float(np.abs(rewards).max()) * FLOAT32_STEP)
    return tolerance if tolerance < 1e-2 else None


def _near_all(case: Case, where: str, found: Floats, target: list[Any], relative: float, absolute: float) -> None:
    case.checks += 1
    expected = np.array([number(value) for value in target], dtype=np.float64)
    if found.shape != expected.shape:
        case.differ(where, f"{found.shape} values, expected {expected.shape}")
        return
    bad = ~np.isclose(found, expected, rtol=relative, atol=absolute)
    if bad.any():
        i = int(np.argmax(bad))
        case.differ(f"{where}[{i}]", f"found {found[i]!r}, expected {expected[i]!r} within {relative:g} relative")


def _arrays(record: dict[str, Any], key: str) -> list[Floats]:
    return [np.array([number(v) for v in sequence[key]], dtype=np.float64) for sequence in record["sequences"]]
