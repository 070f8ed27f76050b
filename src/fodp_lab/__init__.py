"""The laboratory: the paper's experiments, what became of its claims, and what a private step costs.

It knows all of `fodp`; `fodp` knows nothing of it.
"""
