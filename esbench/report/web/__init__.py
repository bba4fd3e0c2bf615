"""The report page: one HTML file with its data, style and script, which needs no network."""
