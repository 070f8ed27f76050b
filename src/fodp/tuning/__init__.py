"""A sealed search for parameters: its price, what is kept of it while it lasts, and the one thing that leaves it."""
