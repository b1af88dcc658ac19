"""Problems, their checks, the kernels that can run them, and which one does."""
