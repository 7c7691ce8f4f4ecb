"""The Megatron back-end: megatron-core in processes of its own, tensor and data parallel, behind the same interface as torch's.

    options.py shape.py                how to compute; what a Hugging Face folder is, and what is refused by name
    sharding.py packing.py memory.py   pure: adapter tensors over ranks, tokens over micro-batches, what to recompute
    backend.py processes.py            the train worker's side: a TrainerBackend over rank processes
    wire.py spec.py                    what is said between the two sides
    rank.py place.py answering.py compute.py                        a rank process: joins, hears, answers
    model.py lora.py attention.py vocabulary.py rope.py weights.py  the model inside it

The package `megatron` is imported in rank processes only; the train worker itself needs neither it nor a GPU. Supported: dense
Llama, Qwen2 (Qwen2.5) and Qwen3 models, tensor parallel times data parallel. Not supported, and refused by name: pipeline, context
and expert parallelism, mixtures of experts, sliding windows, quantised weights.

Boundary: like its sibling, it never sees a reward or an advantage.
"""
