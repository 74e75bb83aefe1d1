"""GPU kernels for paged attention and quantized products, written in Pallas and lowered through Triton.

Those of attention have the contracts of their namesakes in `ops.attention_xla`, and one suite of tests.
Nothing here knows of models, requests or schedules.
"""
