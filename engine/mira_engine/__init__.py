"""The inference engine: experts in a bounded cache, drafting, verification."""
