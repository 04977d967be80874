"""What every host has before anything else: apt that waits for its lock, proxies, mirrors."""
