"""pyinfra roles: one folder per concern, each with one @deploy function and its typed settings."""
