"""Numbers to tables, one file for each kind of table. No torch."""
