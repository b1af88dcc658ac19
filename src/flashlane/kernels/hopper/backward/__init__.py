"""The Hopper backward kernels."""
