"""Opening a run: defaults, digests, identity, seeds, the identity adapter, commit 0. Knows a model's headers, not its weights."""
