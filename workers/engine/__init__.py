"""The engine role: a supervised engine process, its notice to samplers, and the publish activity beside it."""
