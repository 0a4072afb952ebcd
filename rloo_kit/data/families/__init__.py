"""The kit's task families, one per file: a generator, the work and the answer, a habit."""
