"""What a run will need: memory, time by phase and GPU-hours, before anybody pays for them. Needs no network, no GPU and no torch.

shapes     a model's sizes, from its config.json or from the table of models that are known by name
hardware   GPUs
formulas   every formula and constant, with where it comes from
planning   a request on some GPUs: what fits, how long a step takes, what to change
measured   the figures that the constants were calibrated on, and how far the formulas lie from them
text       a plan for people
"""
