"""The commands beside `serve`: clients of a server, of inferd or another one."""
