"""Plans into Programs: what each pipeline rank does in a step, in which order."""
