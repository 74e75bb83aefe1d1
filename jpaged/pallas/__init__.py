"""GPU kernels for paged attention, written in Pallas and lowered through Triton.

Each has the contract of its namesake in `ops.attention_xla`, and one suite of tests. Nothing here
knows of models, requests or schedules.
"""
