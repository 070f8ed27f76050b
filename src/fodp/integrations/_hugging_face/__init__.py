"""What `fodp.integrations.transformers` is made of."""
