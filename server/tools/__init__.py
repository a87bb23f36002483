"""The commands beside `serve`: clients of a server, this one's or another's."""
