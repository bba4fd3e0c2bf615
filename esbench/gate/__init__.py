"""The regression gate: it compares two revisions of a repository in interleaved rounds on one machine."""
