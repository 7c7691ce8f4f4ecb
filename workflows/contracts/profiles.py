"""Named presets of a run request. A profile only fills in what the request leaves out.

`laptop`      the demo: a 3.4 M-parameter proposer, 4x8 grid, two CPU cores, minutes.
`repeatable`  the test profile: each request decoded alone, so that one seed gives one chain whatever is killed.
`paper`       the published setting: 8x64, 50 steps, Adam 4e-5, 32k context (spec algorithm 7); needs GPUs.
`coder`       Qwen2.5-Coder-0.5B-Instruct on the same grid: programs of some hundred tokens, no thinking; one GPU, minutes a step.
"""

from __future__ import annotations

from typing import Any, Final

_LAPTOP: Final[dict[str, Any]] = {
    "model": "packing",
    "search": {"groups": 4, "rollouts": 8, "steps": 8},
    "sampling": {"max_new_tokens": 256, "context_tokens": 1024},
    # The paper's 4e-5 suits large models and 50 steps of 512; a 3.4 M model needs 3e-3 to learn in 8 steps of 32
    # and collapses at 1e-2 (docs/results, spec proposer).
    "optimizer": {"learning_rate": 3e-3},
    "judge": {"wall_seconds": 10},
}

PROFILES: Final[dict[str, dict[str, Any]]] = {
    "laptop": _LAPTOP,
    "repeatable": {
        **_LAPTOP,
        "decode": "repeatable",
        "search": {"groups": 2, "rollouts": 4, "steps": 3},
        # Wide enough that a busy machine never turns a result into a time-out, which would change the chain.
        "judge": {"wall_seconds": 60},
    },
    "paper": {
        "search": {"groups": 8, "rollouts": 64, "steps": 50},
        "optimizer": {"learning_rate": 4e-5},
        "model": "Qwen/Qwen3-8B",
    },
    "coder": {
        "model": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "search": {"groups": 8, "rollouts": 64, "steps": 8},
        # Its programs have 432 tokens on average; 1200 is ample (measured with a 5x5 grid as parent).
        "sampling": {"max_new_tokens": 1200, "context_tokens": 8192},
        "optimizer": {"learning_rate": 4e-5},
        "judge": {"wall_seconds": 60},
    },
}
