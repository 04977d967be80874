"""Pure rules from a HostReport to findings, one module per area, and their registry."""
