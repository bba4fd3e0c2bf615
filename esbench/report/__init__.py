"""Reading runs: tables, plots and pages are pure functions of what the store holds. No torch."""
