"""The portable family: attention in Triton, for every GPU that Triton reaches, and for the CPU by its interpreter."""
