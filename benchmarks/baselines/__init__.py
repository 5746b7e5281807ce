"""What the papers compare with: Plans that the planner does not propose, since they are never the best."""
