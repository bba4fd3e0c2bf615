"""Stored runs as figures: one module per plot, drawn in one shared style, listed by name in the catalog."""
