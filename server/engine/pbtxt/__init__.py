"""config.pbtxt as text: read, its variables filled in, parsed, with the line of each field."""
