"""Reports: tables, plots and pages, computed from the stored runs alone. No torch."""
