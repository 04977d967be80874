"""The model's files: fetched by manifest, verified by hash, switched atomically."""
