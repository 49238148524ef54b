"""Models that run packed: a tiny decoder written here, and the adapter for unmodified transformers models."""
