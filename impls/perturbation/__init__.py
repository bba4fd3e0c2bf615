"""Populations of perturbed models: ``perturb()``, layers, operators, the interface of schemes, and noise."""
