"""transformers without its experts: loading, KV state, sampling, chat."""
