"""Why it is broken: signatures in logs and facts of the host, walked from the symptom to the tool boundary."""
