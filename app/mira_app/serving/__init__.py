"""The local engine behind an OpenAI-compatible endpoint."""
