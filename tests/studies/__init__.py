"""Studies: what takes minutes, or compares times. `nox -s studies` runs them; the tests do not."""
