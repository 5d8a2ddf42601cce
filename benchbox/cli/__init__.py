"""The command line: one file per verb, each a thin layer over a function of the library."""
