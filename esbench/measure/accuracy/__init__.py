"""What the harness is held to: its own clock and rounds beside other timers, itself, and known lengths."""
