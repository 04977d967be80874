"""Data with sources and dates (TOML) and their one typed loader; the messages in English and Chinese."""
