"""Which record is which, without reading private content: repeats, and whether public data is the private data."""
