"""Values of sharded parameters on disk and at initialisation."""
