"""A stand-in for SGLang on machines without a GPU; see launch_server. Tests put the folder above this one on PYTHONPATH."""
