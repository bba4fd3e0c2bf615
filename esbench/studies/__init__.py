"""The harness measured against itself: how accurate its timers are, how far its gate can be trusted."""
