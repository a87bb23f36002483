"""All features at once, for a long time: `python -m tests.storms.mixed`.

`repository` writes the models, `clients` are the kinds of client, `hostile` those that do not read, `__main__` runs a
server with all of them and judges.
"""
