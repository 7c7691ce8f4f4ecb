"""The commands, a module per topic. Importing them is cheap: whatever is heavy is imported inside a command."""
