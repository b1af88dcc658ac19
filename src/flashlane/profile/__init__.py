"""Profiles of one implementation on one problem: torch's profiler, Nsight Compute, Nsight Systems, the roofline."""
