"""Attention in readable torch operations: the specification."""
