"""Preparing and running this project on a machine with GPUs and without a network; see docs/gpu.md.

prepare      archives for such a machine: engine, trainer, application, models
experiment   named experiments there; each writes one JSON document with its command, hardware and versions
record_sglang  real SGLang's answers, for tests/data/sglang
"""
