"""A run's configuration: the schema, what is checked, how YAML is read, old names. Never imports torch."""
