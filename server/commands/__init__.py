"""The functions of the commands: arguments are options, docstrings the help. `inferd.server.program` lists them."""
