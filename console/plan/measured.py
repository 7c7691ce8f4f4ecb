"""Figures that were measured, and what the formulas say of the same thing: the calibration of `tttd plan`, open to everybody.

One H200; Qwen3-8B's shape with rank-32 LoRA unless said otherwise. Trainer: plain megatron-core 0.19.2, torch SDPA, no
Transformer Engine, full recompute. Engine: SGLang 0.5.17 with Triton attention and PyTorch sampling, memory fraction 0.7, all
prompts different.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from console.plan import formulas as f
from console.plan.hardware import GPUS
from console.plan.shapes import KNOWN, ModelShape

_H200 = GPUS["H200"]
_8B, _CODER = KNOWN["Qwen/Qwen3-8B"], KNOWN["Qwen/Qwen2.5-Coder-0.5B-Instruct"]
_RANK, _FRACTION, _SLOTS = 32, 0.7, 2
_K = 1024
TOLERANCE = 0.10
"""How far any formula may lie from its figure."""


@dataclass(frozen=True)
class Figure:
    """One measured number and its formula."""

    what: str
    unit: str
    measured: float
    formula: Callable[[], float]
    calibrates: bool = True
    """False: no constant was chosen by it, so it checks the formula."""

    @property
    def planned(self) -> float:
        return self.formula()

    @property
    def error(self) -> float:
        """Relative."""
        return self.planned / self.measured - 1


def _forward(length: int) -> float:
    return 1 / f.token_seconds(_8B, _H200, length).forward


def _both(length: int) -> float:
    return 1 / f.token_seconds(_8B, _H200, length).recomputed


def _peak(length: int) -> float:
    return f.trainer_bytes(_8B, _RANK, length, recompute=True, optimizer=False).total / 1e9


def _sampled(rows: int, *, adapter: bool) -> float:
    return _engine(_8B, f.Load(rows, rows, 1024, 512, 512), adapter)


def _coder() -> float:
    # The prompt (task and parent program) was not counted; about 700 tokens, one for all.
    return _engine(_CODER, f.Load(512, 1, 700, 432, 1200), adapter=False)


def _engine(shape: ModelShape, load: f.Load, adapter: bool) -> float:
    kv = f.kv_tokens(shape, _H200, _FRACTION, _RANK, _SLOTS)
    return f.sampling(shape, _H200, load, kv, adapter=adapter).tokens_per_second


def _rates(what: str, formula: Callable[[int], float], values: tuple[float, float, float], unit: str) -> list[Figure]:
    lengths = (8 * _K, 16 * _K, 30 * _K)
    middle_checks = [True, False, True]
    return [
        Figure(f"{what}, {n // _K}k tokens a sequence", unit, value, lambda n=n: formula(n), fits)  # type: ignore[misc]
        for n, value, fits in zip(lengths, values, middle_checks, strict=True)
    ]


FIGURES: tuple[Figure, ...] = (
    *_rates("trainer forward", _forward, (24_000, 21_100, 19_100), "tokens/s"),
    *_rates("trainer forward+backward", _both, (7_000, 6_200, 5_200), "tokens/s"),
    *_rates("trainer peak memory (no optimizer)", _peak, (21.5, 26.3, 34.4), "GB"),
    Figure("engine, 64 at once, base", "tokens/s", 2_900, lambda: _sampled(64, adapter=False)),
    Figure("engine, 512 at once, base", "tokens/s", 5_600, lambda: _sampled(512, adapter=False)),
    Figure("engine, 64 at once, LoRA", "tokens/s", 2_300, lambda: _sampled(64, adapter=True)),
    Figure("engine, 512 at once, LoRA", "tokens/s", 4_400, lambda: _sampled(512, adapter=True)),
    Figure("engine, Coder-0.5B, 512 of mean 432, longest 1200", "tokens/s", 36_000, _coder),
    Figure("adapter file, rank 32", "MB", 175, lambda: f.adapter_file_bytes(_8B, _RANK) / 1e6, False),
)


def table() -> str:
    """The figures as a Markdown table."""
    head = ["| figure | unit | measured | planned | error | chose a constant |", "|---|---|---|---|---|---|"]
    rows = [
        f"| {x.what} | {x.unit} | {x.measured:,g} | {_short(x.planned)} | {x.error:+.1%} | {'yes' if x.calibrates else 'no'} |"
        for x in FIGURES
    ]
    return "\n".join([*head, *rows])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
