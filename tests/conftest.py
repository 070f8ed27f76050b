"""Shared settings: one torch thread per worker, so that the two test processes do not fight for cores."""

import os
import tempfile

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fodp", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("fodp")
# The secret that keys fingerprints is made anew, away from the user's own.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="fodp-tests-")
