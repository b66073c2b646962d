"""Where records are kept: on the node in SQLite, or in the cluster as ModelMetadata objects."""
