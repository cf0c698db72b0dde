"""Training rows with other numbers: a chain of equations is parsed as a program and run with other operands."""
