"""The kit's task families, one a file: a generator, a worked solution, a habit."""
