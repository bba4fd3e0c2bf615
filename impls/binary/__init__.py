"""Binarized layers: packed bits, their products, operators on them, and layers for models."""
