"""How records become lots: reading them, people as units, lots of very large data."""
