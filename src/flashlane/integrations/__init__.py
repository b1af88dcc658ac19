"""Attention under the names of other libraries."""
