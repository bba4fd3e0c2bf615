"""The regression gate: two revisions, the same cell, in the same minutes, by workers that take turns."""
