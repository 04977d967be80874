"""What a host is: the probe, the HostReport, and the collectors that fill it."""
