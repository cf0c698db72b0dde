"""What people look at: pictures, tables, names of systems."""
