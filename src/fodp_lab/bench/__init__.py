"""Measuring: what a private step costs beside a plain one and beside other libraries."""
