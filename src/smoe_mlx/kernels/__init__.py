"""The experts of a token in two launches: one kernel text for Metal and CUDA (docs/kernels.md)."""
