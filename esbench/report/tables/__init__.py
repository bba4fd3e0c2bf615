"""Tables of the analysed numbers, one file for each kind. No torch."""
