"""Which rank computes which item of a phase."""
