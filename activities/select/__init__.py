"""Selection of parents: archive in, plan out. Knows no model, no sandbox and no clock."""
