"""Pictures, tables and names of systems: everything that people look at."""
