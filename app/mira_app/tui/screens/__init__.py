"""Screens: each owns the layout of one task."""
