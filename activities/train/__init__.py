"""The train room: one optimizer step of the adapter from one complete grid.

    advantages.py objective.py    the mathematics, numpy float64, shared by every back-end (spec algorithm 2)
    backend.py torch_backend.py   log-probs and gradients of a model: the interface, and transformers + PEFT
    precision.py                  float32 passes through a model whose weights are bfloat16
    grid.py checkpoints.py evidence.py    stored documents in, stored documents out
    stepping.py training.py       one step as a pure function; once per step, whoever comes first
    activity.py                   the only file that knows Temporal
    fake.py                       a tiny model that samples its own grid, with a reward that needs no judge

Boundary: knows nothing of engines, prompts, judges or the archive. A reward is a number here.
"""
