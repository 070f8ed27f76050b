"""Measuring: what a private step costs beside a plain one and beside other libraries. Knows all, is known by none."""
