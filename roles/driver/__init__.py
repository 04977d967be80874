"""The NVIDIA driver: its branch pinned, held and kept from apt's other ideas."""
