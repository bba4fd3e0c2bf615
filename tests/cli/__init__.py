"""The command line, in process where that suffices."""
