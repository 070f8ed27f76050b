"""Doors to other packages: each translates words and refuses what contradicts the plan; the work is done by fodp."""
