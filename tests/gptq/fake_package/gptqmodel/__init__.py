"""Stands in for GPTQModel: the same names, another and quick choice of codes."""
