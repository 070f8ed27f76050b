"""Layers: what each kind makes of its inputs and back-signals, as uses of its parameters."""
