"""The reference implementation, and the checks that compare every scheme with it."""
