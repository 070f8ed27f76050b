"""Gradient sources: where the per-example gradients of a session come from (`fodp.gradients.Source`)."""
