"""Small helpers that know nothing of privacy: argument checks, files, nested batches, optional packages."""
