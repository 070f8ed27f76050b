"""Parts that compose with every method: filters, updates, adaptive clipping, schedules."""
