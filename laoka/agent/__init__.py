"""What runs on a GPU host: sensors, incidents, alerts. Needs only the base install."""
