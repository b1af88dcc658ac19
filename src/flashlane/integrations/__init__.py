"""Faces of other libraries."""
