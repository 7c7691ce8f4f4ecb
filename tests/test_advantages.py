"""Group advantages: the published values, the properties that define them, and the cases that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.errors import InputError
from activities.train.advantages import TARGET_KL, _tilt_kl, group_advantages, leave_one_out, solve_beta

GOLDEN = Path(__file__).parent / "data" / "golden"
ADAPTIVE: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((GOLDEN / "advantages_adaptive_beta.json").read_text())["cases"]
}
BASELINES: list[dict[str, Any]] = json.loads((GOLDEN / "advantages_baselines.json").read_text())["cases"]

# Where a stored float64 value is not the target of the comparison, and why.
REFUSED = {"group_of_2": "K = 2 is degenerate: advantages reach 1e12", "group_of_2_close": "K = 2 is degenerate"}
NANODISCOVER_OTHER = {
    "constant64": "floors Z at 1e-12 instead of adding it, so it gives exactly 0 where the formula gives -1e-12",
}
FLOAT32_UNUSABLE = {
    "half_half_64": "beta sits on the edge of what KL < ln 2 can resolve in float32",
    "tiny_diffs_1e-6": "reward gaps of a few float32 ulps",
    "tiny_diffs_1e-9": "reward gaps below a float32 ulp",
    "cp_saturated_64": "reward gaps near a float32 ulp",
    "erdos_like_64": "beta 193 magnifies the float32 rounding of rewards near 2.6 to 5e-5",
    "constant64": "advantages are 0",
    "constant4": "advantages are 0",
    "constant4_zero": "advantages are 0",
    "group_of_1": "advantages are 0",
}


@pytest.mark.parametrize("name", [n for n in ADAPTIVE if n not in REFUSED])
def test_adaptive_golden_float64(name: str) -> None:
    case = ADAPTIVE[name]
    found = group_advantages(case["rewards"])
    np.testing.assert_allclose(found.advantages, case["reef_float64"]["advantages"], rtol=1e-9, atol=1e-11)
    assert found.beta == pytest.approx(case["reef_float64"]["beta"], rel=1e-9)
    if name not in NANODISCOVER_OTHER:
        np.testing.assert_allclose(found.advantages, case["nanodiscover_float64"]["advantages"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in ADAPTIVE if n not in REFUSED | FLOAT32_UNUSABLE])
def test_adaptive_golden_float32(name: str) -> None:
    case = ADAPTIVE[name]
    found = group_advantages(case["rewards"]).advantages
    np.testing.assert_allclose(found, case["original_float32"]["advantages"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in REFUSED if n in ADAPTIVE])
def test_two_rollouts_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(InputError, match=r"at least 3 rollouts.*mean_baseline"):
        group_advantages(ADAPTIVE[name]["rewards"])


@pytest.mark.parametrize("case", BASELINES, ids=[c["name"] for c in BASELINES])
def test_baselines_golden(case: dict[str, Any]) -> None:
    rewards = np.array(case["rewards"])
    mean = group_advantages(rewards, "mean_baseline").advantages
    # The references are float32: a mean of rewards near 2.6 is known to 2.4e-7 there.
    np.testing.assert_allclose(mean, case["mean_baseline"], rtol=1e-5, atol=4e-7 * max(1.0, float(np.abs(rewards).max())))
    entropic = group_advantages(rewards, "entropic", beta=2.0).advantages
    # Large advantages are a quotient by a float32 difference of nearly equal sums: 2e-5 relative.
    np.testing.assert_allclose(entropic, np.array(case["entropic_beta2"], dtype=float), rtol=1e-4, atol=2e-6)


def test_values_of_the_specification() -> None:
    ramp = group_advantages([1.0, 2.0, 3.0, 4.0])
    assert ramp.beta == pytest.approx(1.445859, abs=1e-6)
    np.testing.assert_allclose(ramp.advantages, [-0.96963, -0.86670, -0.33870, 8.86542], atol=5e-6)
    one_success = group_advantages([0.0] * 63 + [1.0])
    assert one_success.advantages[-1] == pytest.approx(27.79, abs=0.01)
    assert one_success.advantages[0] == pytest.approx(-0.306, abs=1e-3)
    one_failure = group_advantages([1.0] * 63 + [0.0]).advantages
    assert one_failure[0] == pytest.approx(0.0161, abs=1e-4)
    assert one_failure[-1] == pytest.approx(-1.0)


grids = st.lists(st.integers(0, 1000), min_size=3, max_size=24).map(lambda xs: [x / 100 for x in xs])


@given(grids)
def test_solved_beta_meets_the_target_or_is_the_limit(rewards: list[float]) -> None:
    array = np.array(rewards)
    beta = solve_beta(array)
    reached = _tilt_kl(array, beta)
    ties = int((array == array.max()).sum())
    if 2 * ties < len(rewards):  # fewer than half tied on top: the KL can reach ln 2
        assert reached == pytest.approx(TARGET_KL, abs=1e-9)
    else:
        assert reached <= TARGET_KL + 1e-9


@given(grids, st.integers(-50, 50), st.sampled_from([0.5, 2.0, 8.0]))
def test_adaptive_ignores_shift_and_scale(rewards: list[float], shift: int, scale: float) -> None:
    array = np.array(rewards)
    if 2 * int((array == array.max()).sum()) >= len(rewards):
        return  # best-effort β does not scale
    before = group_advantages(array).advantages
    after = group_advantages(array * scale + shift).advantages
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-7)


@given(grids)
def test_better_rewards_never_get_less(rewards: list[float]) -> None:
    order = np.argsort(rewards, kind="stable")
    advantages = group_advantages(rewards).advantages[order]
    assert (np.diff(advantages) >= -1e-12).all()
    assert advantages[-1] >= -1e-9
    assert (advantages >= -1.0).all()


def test_leave_one_out_is_the_formula() -> None:
    rewards = np.array([0.3, 1.1, -0.4])
    e = [math.exp(1.7 * (r - 1.1)) for r in rewards]
    expected = [e[0] / ((e[1] + e[2]) / 2) - 1, e[1] / ((e[0] + e[2]) / 2) - 1, e[2] / ((e[0] + e[1]) / 2) - 1]
    np.testing.assert_allclose(leave_one_out(rewards, 1.7), expected, rtol=1e-10)


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan, 2.0], [1.0, math.inf, 0.0]])
def test_rewards_must_be_finite_numbers(rewards: list[float]) -> None:
    with pytest.raises(InputError, match="finite"):
        group_advantages(rewards)
