"""The paper's experiments and a fair comparison: specifications, a resumable runner, statistics and a report."""
