"""What travels and how it is asked: programs, parameters, plans, graphs, printing, errors, and torch internals."""
