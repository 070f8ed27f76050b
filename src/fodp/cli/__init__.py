"""The command line: words and options; everything else is done by the library."""
