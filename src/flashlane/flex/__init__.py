"""Score and mask programs: Python functions of a score or of a pair as expressions, kernels' code and block lists."""
