"""The barrier between search and training: every rollout of the grid judged, all under one policy version. Knows no tensors."""
