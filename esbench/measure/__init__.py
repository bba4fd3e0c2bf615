"""The measuring wing: needs torch and a device, and meets the reading wing only in records."""
