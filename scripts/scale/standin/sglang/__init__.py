"""Stands where SGLang would be, on the engine process's path alone."""
