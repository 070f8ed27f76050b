"""Judging: from records to verdicts on the paper's claims, with the statistics they rest on."""
