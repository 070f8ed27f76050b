"""Telling: tables, figures, REPRODUCTION.md and one HTML page; every text is a function of the records."""
