"""Tables of the analyzed numbers, one file for each kind. No torch."""
