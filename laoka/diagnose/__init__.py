"""Log signatures and the five-step chain from symptom to cause."""
