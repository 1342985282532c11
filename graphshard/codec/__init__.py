"""Programs, passes and signatures as JSON, without pickle and without imports of what a file names."""
