"""Which request computes what in the next step, and which KV blocks it owns. Host only: no jax."""
