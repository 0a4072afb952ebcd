"""The kit's task families, one per file: a generator, a worked solution, a habit."""
