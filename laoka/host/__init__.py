"""What a host is: one probe (one round trip), HostReport, and its collectors."""
