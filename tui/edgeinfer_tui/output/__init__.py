"""What commands print: tables, progress, text as it is generated."""
