"""config.pbtxt as text: reads it, fills in variables, parses it, and records the line of each field."""
