"""The program a person runs. Never imports torch."""
