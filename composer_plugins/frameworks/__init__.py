"""What a framework is, as data: one table for each. No framework is imported here."""
