"""See and replay what was compiled: dumps, stages, one pass alone, bisection."""
