"""The gate: a host whose board can't drive the card is refused before anything changes."""
