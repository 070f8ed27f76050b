"""Running: the paper's experiments and a fair comparison as specifications, and a resumable runner with records."""
