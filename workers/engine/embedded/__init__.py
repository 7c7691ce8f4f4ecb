"""The embedded engine: a small HTTP server on transformers that speaks the subset of SGLang's native protocol that we use.

The same client code runs against it and against SGLang (design 4). It serves one base model and any number of LoRA adapters by
name. It knows nothing of runs, tasks or policies, keeps nothing on disk, and downloads nothing.

    __main__   options, logs, signals            server    routes and HTTP answers
    protocol   requests in, answers out          adapters  LoRA directories; names and who uses them
    batcher    the one thread that computes      decoding  sampling many rows with one KV cache
    scoring    log-probs of given tokens         sampling  from logits to one token and its log-prob
    model      weights and forward passes        cache     KV cache whose rows come and go
"""
