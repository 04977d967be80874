"""laoka: from a bare board with second-hand Tesla V100 cards to an LLM endpoint that stays up."""

__version__ = "0.1.0"
