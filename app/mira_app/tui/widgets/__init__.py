"""Widgets: each owns one thing, posts messages up, and knows no screen."""
