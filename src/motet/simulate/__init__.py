"""A Program and the times of its actions into a Timeline."""
