"""Decisions. Pure: no torch, clock, randomness, threads, files or logging."""
