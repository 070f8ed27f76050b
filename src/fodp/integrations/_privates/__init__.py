"""What other packages have no public name for: a file for each package, and the only one that touches it."""
