"""The functions of the commands: arguments are options, docstrings the help. `server.program` lists them."""
