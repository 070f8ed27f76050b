"""Shared settings: one torch thread per worker, so that the two test processes do not fight for cores."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fodp", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("fodp")
